//! Who holds which block. A step has no time to look all of them up: each is a walk through
//! three places that no cache holds.

use tch::Tensor;

use crate::ffi::tensor::storage_identity;
use crate::ffi::timeline::{Block, Finder, Followed, Now, now};
use crate::memory::{Marks, Role};
use crate::optim::Optimizer;
use crate::state::Named;

#[derive(Debug, Default)]
pub(super) struct Labels {
    parameters: Followed,
    buffers: Followed,
    /// The tensors of the optimizer's groups, and their state.
    optimizer: Followed,
    gradients: Finder,
    /// The storages of the parameters, sorted.
    storages: Vec<u64>,
    /// What the optimizer holds beside the model.
    state: Vec<Block>,
    /// How many followed blocks had gone when that was found.
    state_gone: u64,
    masters: Masters,
}

/// Whether the optimizer moves tensors of its own in the model's place, with gradients of theirs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Masters {
    #[default]
    None,
    Some,
}

impl Labels {
    /// Takes over what is known of the optimizer's state before its first update.
    pub(super) fn state_is(&mut self, now: &Now, blocks: impl Iterator<Item = Block>) {
        self.state_gone = now.gone;
        self.state.clear();
        self.state.extend(blocks);
    }

    /// What the optimizer held at its last update, unless some of it may be gone.
    pub(super) fn state(&self, marks: &mut Marks, now: &Now) {
        if self.state_gone == now.gone {
            marks.add_at(now.next, Role::OptimizerState, self.state.iter().copied());
        }
    }

    pub(super) fn model(&mut self, marks: &mut Marks, now: &Now, parameters: &[Named], buffers: &[Named]) {
        let lists = [
            (Role::Parameters, &mut self.parameters, parameters),
            (Role::Buffers, &mut self.buffers, buffers),
        ];
        for (role, followed, named) in lists {
            follow(followed, now, named);
            marks.add_at(now.next, role, followed.all().map(|(_, block)| block));
        }
    }

    pub(super) fn gradients(&mut self, marks: &mut Marks, parameters: &[Named]) {
        marks.add(Role::Gradients, self.gradients.find(tensors(parameters), true).iter().copied());
    }

    /// Moments, and what the optimizer moves in place of the model's own tensors.
    pub(super) fn optimizer(
        &mut self,
        marks: &mut Marks,
        parameters: &[Named],
        optimizer: &mut dyn Optimizer,
    ) {
        let now = now();
        let moved = follow(&mut self.parameters, &now, parameters);
        let mut pass = self.optimizer.pass(&now);
        for group in 0..optimizer.groups().len() {
            let held = optimizer.groups().get(group).map_or(&[][..], |group| group.parameters());
            let count = held.len();
            pass.follow(tensors(held));
            for index in 0..count {
                pass.follow(optimizer.state_of(group, index).iter().map(|tensor| &**tensor));
            }
        }
        let another = pass.end() | moved;
        if !another && self.state_gone == now.gone {
            self.master_gradients(marks, optimizer);
            return; // the rest is as it was labelled when the window began
        }
        self.state_gone = now.gone;
        self.storages.clear();
        self.storages.extend(self.parameters.all().map(|(storage, _)| storage));
        self.storages.sort_unstable();
        self.state.clear();
        let beside = |storage: &u64| self.storages.binary_search(storage).is_err();
        self.state
            .extend(self.optimizer.all().filter(|(storage, _)| beside(storage)).map(|(_, block)| block));
        marks.forget(Role::OptimizerState);
        self.state(marks, &now);
        let mut held = optimizer.groups().iter().flat_map(|group| tensors(group.parameters()));
        let masters = held.any(|tensor| beside(&(storage_identity(tensor) as u64)));
        self.masters = if masters { Masters::Some } else { Masters::None };
        self.master_gradients(marks, optimizer);
    }

    /// A label holds for a block's whole life, so it comes in time at the update.
    fn master_gradients(&mut self, marks: &mut Marks, optimizer: &dyn Optimizer) {
        if self.masters == Masters::Some {
            let held = optimizer.groups().iter().flat_map(|group| tensors(group.parameters()));
            marks.add(Role::Gradients, self.gradients.find(held, true).iter().copied());
        }
    }
}

/// Whether one of them has another block than the last time.
fn follow(followed: &mut Followed, now: &Now, named: &[Named]) -> bool {
    let mut pass = followed.pass(now);
    pass.follow(tensors(named));
    pass.end()
}

fn tensors(named: &[Named]) -> impl Iterator<Item = &Tensor> {
    named.iter().map(|named| &named.tensor)
}
