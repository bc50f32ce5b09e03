//! What a stack holds, by dtype and place, and an estimate put together from that and from trials.

use std::collections::HashSet;

use tch::Tensor;

use super::Stack;
use crate::error::Result;
use crate::ffi::{storage, tensor};
use crate::memory::{
    self, Activations, Estimate, Foreseen, Held, Home, Phase, Role, RoleBytes, Trial, along, foresee,
};
use crate::optim::bytes_of;
use crate::state::Named;
use crate::step::{GradientUse, KeptGradients};

impl Stack {
    /// Each parameter of the optimizer's groups: group, and index in it.
    pub(super) fn places(&self) -> Vec<(usize, usize)> {
        let groups = self.optimizer.groups().iter().enumerate();
        groups
            .flat_map(|(group, held)| (0..held.parameters().len()).map(move |index| (group, index)))
            .collect()
    }

    /// What the optimizer moves in place of the model's own tensors.
    pub(super) fn masters(&self) -> Vec<Named> {
        let known: HashSet<usize> =
            self.model.parameters.iter().map(|one| tensor::storage_identity(&one.tensor)).collect();
        let moved = self.optimizer.groups().iter().flat_map(|group| group.parameters());
        moved.filter(|one| !known.contains(&tensor::storage_identity(&one.tensor))).cloned().collect()
    }

    fn optimizer_state(&mut self) -> Vec<Held> {
        let mut state = Vec::new();
        for (group, index) in self.places() {
            self.optimizer.state_of(group, index).into_iter().for_each(|tensor| hold(&mut state, tensor));
        }
        state
    }

    fn gradients(&self) -> Vec<Held> {
        let mut gradients = Vec::new();
        for Named { tensor, .. } in self.model.parameters.iter().filter(|one| one.tensor.requires_grad()) {
            Held::add(&mut gradients, tensor.kind(), Home::Memory(tensor.device()), bytes_of(tensor));
        }
        gradients
    }

    /// The most bytes of one parameter that visit memory while it is updated.
    fn visiting(&mut self) -> u64 {
        let away = |tensor: &Tensor| if storage::is_away(tensor) { bytes_of(tensor) } else { 0 };
        let mut most = 0;
        for (group, index) in self.places() {
            let state: u64 = self.optimizer.state_of(group, index).iter().map(|tensor| away(tensor)).sum();
            let parameter = self.optimizer.groups().get(group).and_then(|held| held.parameters().get(index));
            most = most.max(state + parameter.map_or(0, |one| away(&one.tensor)));
        }
        most
    }

    /// What strategies keep of gradients, together.
    fn strategies_keep(&self) -> KeptGradients {
        let size = self.model_size();
        let later = self.has_windows();
        self.strategies().fold(KeptGradients::default(), |sum, strategy| {
            let kept = strategy.kept_gradients(&size);
            KeptGradients {
                own: sum.own + kept.own + if later { kept.copies } else { 0 },
                copies: sum.copies + kept.copies,
                taken: sum.taken + kept.taken,
            }
        })
    }

    /// What is kept of so many bytes of gradients from one backward to the next.
    fn kept(&self, gradients: u64, sums: KeptGradients) -> u64 {
        match self.optimizer.gradients() {
            GradientUse::WhenFinal if !self.has_windows() => 0,
            GradientUse::EachMicroBatch => 0,
            _ => gradients.saturating_sub(sums.taken) + sums.own,
        }
    }

    pub(super) fn put_together(&mut self, rows: i64, trials: &[Trial]) -> Result<Estimate> {
        let device = self.model.device;
        let live = memory::stats(device)?.current;
        let (gradients, sums) = (self.gradients(), self.strategies_keep());
        let visiting = self.visiting();
        let highest = self.highest(rows, trials, visiting);
        let peak = live + highest.growth;
        Ok(Estimate {
            device,
            rows,
            parameters: held(self.model.parameters.iter()),
            buffers: held(self.model.buffers.iter()),
            master_weights: held(self.masters().iter()),
            optimizer_state: self.optimizer_state(),
            hidden_state: !self.optimizer.has_state(),
            gradient_sums: sums.own,
            kept_gradients: self.kept(Held::total(&gradients), sums),
            gradients,
            activations: activations(rows, trials),
            live,
            peak,
            phase: highest.phase,
            segment: highest.segment,
            roles: highest.roles.map(|roles| settled(roles, peak)),
            how: highest.how,
        })
    }

    /// The highest moment: in a pass, or in the update.
    fn highest(&self, rows: i64, trials: &[Trial], visiting: u64) -> Foreseen {
        let mut pass = foresee(trials, rows);
        if self.optimizer.gradients().changes_in_backward() {
            pass.growth += visiting;
            add(&mut pass.roles, Role::OptimizerState, visiting);
        }
        let Some(last) = trials.last() else { return pass };
        let growth = last.grown(last.after).max(0) as u64 + visiting;
        if growth <= pass.growth {
            return pass;
        }
        let timeline = last.timeline.as_ref();
        let mut roles = timeline.and_then(|timeline| timeline.moments().last()).map(|moment| moment.roles);
        add(&mut roles, Role::OptimizerState, visiting);
        Foreseen { growth, phase: Phase::Update, segment: None, roles, how: pass.how }
    }
}

fn add(roles: &mut Option<RoleBytes>, role: Role, bytes: u64) {
    if let Some(roles) = roles {
        roles[role] += bytes;
    }
}

/// Roles that add up to the peak; what is nobody's is other.
fn settled(mut roles: RoleBytes, peak: u64) -> RoleBytes {
    let others = roles.total() - roles[Role::Other];
    roles[Role::Other] = peak.saturating_sub(others);
    roles
}

fn activations(rows: i64, trials: &[Trial]) -> Activations {
    let (per_row, fixed) = match trials {
        [.., a, b] => {
            let per_row = b.activations - a.activations;
            (per_row, along(a.rows, (a.activations, b.activations), 0))
        }
        [one] => (one.activations / one.rows, one.activations % one.rows),
        [] => (0, 0),
    };
    Activations::new(rows, fixed, per_row)
}

fn held<'a>(named: impl Iterator<Item = &'a Named>) -> Vec<Held> {
    let mut list = Vec::new();
    named.for_each(|one| hold(&mut list, &one.tensor));
    list
}

fn hold(list: &mut Vec<Held>, tensor: &Tensor) {
    let home = if storage::is_away(tensor) { Home::Away } else { Home::Memory(tensor.device()) };
    Held::add(list, tensor.kind(), home, bytes_of(tensor));
}
