//! The moment of a state: the generators and the open window.

use tch::{Device, Kind, Tensor};

use super::finals::gradient_use;
use super::window::Open;
use super::{Stack, consumed};
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::PeakScope;
use crate::rng::Generators;
use crate::state::{Found, Like, Named, Source, StateVisitor, Value};
use crate::step::{GradientUse, WindowRule};

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
    /// The generators and the open window.
    pub(super) fn visit_moment(&mut self, visitor: &mut StateVisitor<'_>) -> Result<Restored> {
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

    /// Refuses a saved window that cannot be gone on with here; asked once the names fit.
    pub(super) fn check_window(&self, source: &dyn Source) -> Result<()> {
        let count = |name: &str| match source.find(name) {
            Some(Found::Scalar(Value::Int(number))) => *number,
            _ => 0,
        };
        if count("window.open") == 0 {
            return Ok(());
        }
        let (done, length) = (count("window.done"), count("window.length"));
        let by_tokens = count("window.by_tokens") == 1;
        if done < 1 || length < 1 || (!by_tokens && done >= length) {
            let problem =
                format!("`window.done` is {done} in an open window whose `window.length` is {length}");
            return Err(Error::State { problems: vec![problem] });
        }
        if gradient_use(self.optimizer.as_ref(), &self.strategies) != GradientUse::EachMicroBatch {
            return Ok(());
        }
        Err(Error::Incompatible {
            left: self.optimizer.name(),
            right: "a state with an open window".to_owned(),
            why: "the window's first gradients were added up beside the optimizer, the next ones would join \
                  its momentum"
                .to_owned(),
            remedy: "save between windows, or end the window without InBackward and save again".to_owned(),
        })
    }

    fn visit_window(&mut self, visitor: &mut StateVisitor<'_>, now: &Generators) -> Result<Restoring> {
        let device = self.model.device;
        let mut open = Open::new(self.rule(), None, PeakScope::new(device)?);
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
    pub(super) fn install(&mut self, restored: Restored) -> Result<()> {
        let Restored { generators, window } = restored;
        self.zero_grad();
        self.open = None;
        self.finals.forget();
        let mut resumed = None;
        if let Some(Restoring { open, gradients, copies, generators }) = window {
            for (parameter, gradient) in self.model.parameters.iter().zip(&gradients) {
                gradient.as_ref().map_or(Ok(()), |gradient| ffi::grad::set(&parameter.tensor, gradient))?;
            }
            self.window_start.replace(copies, generators);
            if gradient_use(self.optimizer.as_ref(), &self.strategies) != GradientUse::AtUpdate {
                self.finals.begin(self.optimizer.as_ref())?;
            }
            self.clock.set_rule(open.rule);
            resumed = Some((open.done(), open.counted));
            self.open = Some(open);
        } else {
            self.drop_window();
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
        self.consumed_before = from.consumed_before;
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
        visitor.float("scale", &mut self.scale)?;
        visitor.nested("data", |visitor| consumed::visit(visitor, &mut self.consumed_before))
    }
}

/// Generators as they were saved, in a load; `like` has the device that they must be of.
fn visit_generators(
    visitor: &mut StateVisitor<'_>,
    here: &Generators,
    like: &Generators,
) -> Result<Option<Generators>> {
    let (cpu, of_device) = here.to_tensors()?;
    let shape = |tensor: &Tensor| Like { size: tensor.size(), kind: Some(Kind::Uint8), device: Device::Cpu };
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
