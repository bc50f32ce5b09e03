//! The whole training state, named once: for memory, for snapshots, and back.

use super::moment::Restored;
use super::{Health, Stack, consumed};
use crate::error::{Error, Result};
use crate::ffi;
use crate::state::{self, Named, Sink, Source, State, StateVisitor};
use crate::step::{Place, is_inside};

impl Stack {
    /// The whole training state, copied: parameters, buffers, optimizer, strategies, position, that
    /// of the data, generators and, where one is open, the window with its gradients.
    ///
    /// # Errors
    /// A call inside a step; an optimizer whose state is out of reach; out of memory.
    pub fn state(&mut self) -> Result<State> {
        let mut state = State::default();
        self.collect_into("Stack::state", &mut state)?;
        Ok(state)
    }

    /// Loads a state collected from the same stack over the same names. An open window is
    /// replaced by the saved one or, where none was open, dropped.
    ///
    /// # Errors
    /// [`Error::State`] with every entry that does not fit, [`Error::Incompatible`] for an open
    /// window under an optimizer that takes gradients into its momentum; nothing changed then.
    /// [`Error::Poisoned`] where it failed after the first tensor was written.
    pub fn load_state(&mut self, state: &State) -> Result<()> {
        self.load_from("Stack::load_state", state, || Ok(()))
    }

    /// Describes everything that [`Stack::collect_into`] hands on, without bytes.
    pub(crate) fn describe_into(&mut self, call: &'static str, sink: &mut dyn Sink) -> Result<()> {
        self.refuse_state(call)?;
        state::describe(sink, |visitor| self.visit_state(visitor).map(drop))
    }

    /// Hands the state to `sink`, one tensor at a time.
    pub(crate) fn collect_into(&mut self, call: &'static str, sink: &mut dyn Sink) -> Result<()> {
        self.refuse_state(call)?;
        state::collect(sink, |visitor| self.visit_state(visitor).map(drop))
    }

    /// Loads from a source that fits and that `verify` accepts; until then nothing changes.
    pub(crate) fn load_from(
        &mut self,
        call: &'static str,
        source: &dyn Source,
        verify: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.refuse_out_of_reach(call)?;
        self.optimizer.allocate()?;
        state::check(source, |visitor| self.visit_state(visitor).map(drop))?;
        self.check_window(source)?;
        verify()?;
        let mut restored = None;
        let loaded = state::load(source, |visitor| {
            restored = Some(self.visit_state(visitor)?);
            Ok(())
        });
        match (loaded, restored) {
            (Ok(()), Some(restored)) => self.install(restored).map_err(|error| self.poison(error))?,
            (Err(broken), _) if broken.touched => return Err(self.poison(broken.error)),
            (Err(broken), _) => return Err(broken.error),
            (Ok(()), None) => {}
        }
        ffi::autocast::clear_cache();
        self.health = Health::Sound;
        Ok(())
    }

    /// Micro-batches done in the open window.
    pub(crate) fn open_micro_batches(&self) -> u64 {
        self.open.as_ref().map_or(0, |open| open.done() as u64)
    }

    /// Lets strategies that keep copies of weights take over those that were loaded.
    pub(crate) fn weights_loaded(&self, loaded: &[Named]) -> Result<()> {
        self.strategies.iter().try_for_each(|strategy| strategy.weights_loaded(loaded))
    }

    /// Further names of tied tensors.
    pub(crate) fn aliases(&self) -> &[(String, String)] {
        &self.model.aliases
    }

    fn refuse_state(&self, call: &'static str) -> Result<()> {
        self.check_health()?;
        self.refuse_out_of_reach(call)?;
        match self.optimizer.refuses_snapshot() {
            None => Ok(()),
            Some(state) => Err(Error::CallOrder {
                call,
                state,
                remedy: "end the window with flush() or drop it with discard() first",
            }),
        }
    }

    fn refuse_out_of_reach(&self, call: &'static str) -> Result<()> {
        if is_inside() {
            let state = "inside a step".to_owned();
            return Err(Error::CallOrder { call, state, remedy: "call it between steps" });
        }
        if self.optimizer.has_state() {
            return Ok(());
        }
        Err(Error::Unsupported {
            what: "saving and loading".to_owned(),
            place: format!("with {}", self.optimizer.name()),
            remedy: "use one of memfit's own optimizers".to_owned(),
        })
    }

    /// What a load makes comes first, so that a failure there has touched nothing.
    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<Restored> {
        self.visit_description(visitor)?;
        let restored = self.visit_moment(visitor)?;
        self.visit_model(visitor)?;
        visitor.nested("optimizer", |visitor| self.optimizer.visit_state(visitor))?;
        self.visit_strategies(visitor)?;
        visitor.nested("position", |visitor| {
            visitor.count("steps", &mut self.position.steps)?;
            visitor.count("windows", &mut self.position.windows)?;
            visitor.count("micro_batches", &mut self.position.micro_batches)
        })?;
        visitor.nested("data", |visitor| consumed::visit(visitor, &mut self.consumed))?;
        Ok(restored)
    }

    /// What must be the same on both sides.
    fn visit_description(&self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        let strategies: Vec<String> =
            self.strategies.iter().filter_map(|strategy| strategy.identity()).collect();
        visitor.nested("stack", |visitor| {
            visitor.must_equal("optimizer", &self.optimizer.identity())?;
            visitor.must_equal("strategies", &strategies.join(", "))?;
            self.optimizer.groups().iter().enumerate().try_for_each(|(index, group)| {
                let names: Vec<&str> = group.parameters().iter().map(|one| one.name.as_str()).collect();
                visitor.must_equal(&format!("group{index}"), &names.join(", "))
            })
        })
    }

    fn visit_model(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        let model = &mut self.model;
        for (list, named) in [("parameters", &mut model.parameters), ("buffers", &mut model.buffers)] {
            visitor.nested(list, |visitor| {
                named.iter_mut().try_for_each(|Named { name, tensor }| {
                    // A weight that is away visits.
                    let held = if visitor.needs_bytes() { crate::offload::hold(tensor)? } else { None };
                    visitor.tensor(name, tensor)?;
                    held.map_or(Ok(()), crate::offload::Hold::end)
                })
            })?;
        }
        Ok(())
    }

    /// Each under its place and, where several stand at one place, its name.
    fn visit_strategies(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        let places: Vec<_> = self.strategies.iter().map(|strategy| strategy.place()).collect();
        for strategy in &mut self.strategies {
            let place = strategy.place();
            let alone = places.iter().filter(|other| **other == place).count() == 1;
            let mut under = match place {
                // `window` is the open window.
                Place::Window => "splitting".to_owned(),
                place => format!("{place:?}").to_lowercase(),
            };
            if !alone {
                under = format!("{under}.{}", strategy.name());
            }
            visitor.nested(&under, |visitor| strategy.visit_state(visitor))?;
        }
        Ok(())
    }
}
