//! The whole training state, named once: for memory, for snapshots, and back.

use tch::{Kind, Tensor};

use super::window::Open;
use super::{Health, Stack};
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::PeakScope;
use crate::rng::Generators;
use crate::state::{self, Like, Named, Sink, Source, State, StateVisitor};
use crate::step::{WindowRule, is_inside};

/// What a load makes before it touches the training.
#[derive(Debug)]
pub(super) struct Restored {
    generators: Option<Generators>,
    window: Option<Restoring>,
}

/// An open window in the making.
#[derive(Debug)]
struct Restoring {
    open: Open,
    gradients: Vec<Option<Tensor>>,
    copies: Vec<Option<Tensor>>,
    generators: Option<Generators>,
}

impl Stack {
    /// The whole training state, copied: parameters, buffers, optimizer, strategies, position,
    /// generators and, where one is open, the window with its gradients.
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
    /// [`Error::State`] with every entry that does not fit, and nothing changed;
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
            let mut under = format!("{place:?}").to_lowercase();
            if !alone {
                under = format!("{under}.{}", strategy.name());
            }
            visitor.nested(&under, |visitor| strategy.visit_state(visitor))?;
        }
        Ok(())
    }

    /// The generators and the open window.
    fn visit_moment(&mut self, visitor: &mut StateVisitor<'_>) -> Result<Restored> {
        let now = Generators::capture(self.model.device)?;
        let generators = visitor.nested("rng", |visitor| visit_generators(visitor, &now, &now))?;
        let open = visitor.exists("window.open", self.open.is_some())?;
        visitor.set_in_window(open);
        let window = if open {
            Some(visitor.nested("window", |visitor| self.visit_window(visitor, &now))?)
        } else {
            None
        };
        Ok(Restored { generators, window })
    }

    fn visit_window(&mut self, visitor: &mut StateVisitor<'_>, now: &Generators) -> Result<Restoring> {
        let device = self.model.device;
        let mut open = Open::new(self.rule(), PeakScope::new(device)?);
        if let Some(here) = self.open.as_ref().filter(|_| visitor.collects()) {
            open.take_figures(here);
        }
        open.visit_figures(visitor)?;
        let total = Like { size: Vec::new(), kind: None, device };
        open.total = visitor.made("total", open.total.as_ref(), &total)?;
        let mut gradients = Vec::new();
        visitor.nested("gradients", |visitor| {
            self.model.parameters.iter().try_for_each(|Named { name, tensor }| {
                let mut gradient = ffi::grad::get(tensor).filter(|_| visitor.collects());
                visitor.optional(name, &mut gradient, tensor)?;
                gradients.push(gradient);
                Ok(())
            })
        })?;
        let (copies, generators) =
            visitor.nested("start", |visitor| self.visit_window_start(visitor, now))?;
        Ok(Restoring { open, gradients, copies, generators })
    }

    fn visit_window_start(
        &self,
        visitor: &mut StateVisitor<'_>,
        now: &Generators,
    ) -> Result<(Vec<Option<Tensor>>, Option<Generators>)> {
        let start = &self.window_start;
        let mut copies = Vec::new();
        visitor.nested("buffers", |visitor| {
            self.model.buffers.iter().zip(start.copies()).try_for_each(|(buffer, copy)| {
                let mut saved = Some(copy.shallow_clone());
                visitor.must_have(&buffer.name);
                visitor.optional(&buffer.name, &mut saved, &buffer.tensor)?;
                copies.push(saved);
                Ok(())
            })
        })?;
        let here = start.generators().unwrap_or(now);
        let generators = visitor.nested("rng", |visitor| visit_generators(visitor, here, now))?;
        Ok((copies, generators))
    }

    /// Nothing here may be tried twice: everything that could be made beforehand was.
    fn install(&mut self, restored: Restored) -> Result<()> {
        let Restored { generators, window } = restored;
        self.zero_grad();
        self.open = None;
        let mut resumed = None;
        if let Some(Restoring { open, gradients, copies, generators }) = window {
            for (parameter, gradient) in self.model.parameters.iter().zip(&gradients) {
                gradient.as_ref().map_or(Ok(()), |gradient| ffi::grad::set(&parameter.tensor, gradient))?;
            }
            self.window_start.replace(copies, generators);
            self.clock.set_rule(open.rule);
            resumed = Some((open.done(), open.counted));
            self.open = Some(open);
        } else {
            self.rule();
        }
        self.clock.resume(resumed);
        generators.map_or(Ok(()), |generators| generators.restore())
    }
}

impl Open {
    fn take_figures(&mut self, from: &Self) {
        self.rule = from.rule;
        self.done = from.done;
        self.counted = from.counted;
        self.first_weight = from.first_weight;
        self.tokens = from.tokens;
        self.scale = from.scale;
        self.total = from.total.as_ref().map(Tensor::shallow_clone);
    }

    fn visit_figures(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        let by_tokens = visitor.exists("by_tokens", matches!(self.rule, WindowRule::Tokens(_)))?;
        let mut length = match self.rule {
            WindowRule::Micros(micros) => micros as u64,
            WindowRule::Tokens(tokens) => tokens,
        };
        visitor.count("length", &mut length)?;
        let mut done = self.done as u64;
        visitor.count("done", &mut done)?;
        if visitor.loads() {
            self.rule =
                if by_tokens { WindowRule::Tokens(length) } else { WindowRule::Micros(length as usize) };
            self.done = done as usize;
        }
        visitor.count("counted", &mut self.counted)?;
        visitor.float("first_weight", &mut self.first_weight)?;
        visitor.float("tokens", &mut self.tokens)?;
        visitor.float("scale", &mut self.scale)
    }
}

/// Generators as they were saved, in a load; `like` has the device that they must be of.
fn visit_generators(
    visitor: &mut StateVisitor<'_>,
    here: &Generators,
    like: &Generators,
) -> Result<Option<Generators>> {
    let (cpu, of_device) = here.to_tensors()?;
    let shape =
        |tensor: &Tensor| Like { size: tensor.size(), kind: Some(Kind::Uint8), device: tch::Device::Cpu };
    visitor.must_have("cpu");
    let saved = visitor.made("cpu", Some(&cpu), &shape(&cpu))?;
    let saved_device = match &of_device {
        None => None,
        Some(state) => {
            visitor.must_have("device");
            visitor.made("device", Some(state), &shape(state))?
        }
    };
    saved.map(|cpu| Generators::from_tensors(like.device(), &cpu, saved_device.as_ref())).transpose()
}
