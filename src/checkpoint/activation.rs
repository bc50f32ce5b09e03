use std::fmt::Debug;
use std::marker::PhantomData;

use tch::Tensor;
use tch::nn::{Module, ModuleT};

use super::segment::{EarlyStop, Segment};
use super::shared::Shared;
use crate::error::Result;
use crate::step::unwind;

/// The wrapped module is a [`Module`]: it has no train flag.
#[derive(Debug)]
pub struct Plain;

/// The wrapped module is a [`ModuleT`]: the train flag of forward is that of the recompute.
#[derive(Debug)]
pub struct WithTrain;

/// A module whose activations are not kept: backward computes them again.
///
/// Made with [`ActivationCheckpoint::new`] it is a [`Module`], with
/// [`ActivationCheckpoint::with_train`] a [`ModuleT`], so it takes its module's place in
/// `nn::seq` or `nn::seq_t`. The [module documentation](super) tells cost and limits.
#[derive(Debug)]
pub struct ActivationCheckpoint<M, K = Plain> {
    inner: Shared<M>,
    segment: Segment,
    kind: PhantomData<fn() -> K>,
}

impl<M: Module + 'static> ActivationCheckpoint<M, Plain> {
    /// Wraps a module without a train flag.
    pub fn new(module: M) -> Self {
        Self::wrap(module)
    }

    /// As `forward`, with errors as values.
    ///
    /// # Errors
    /// What the module panics with, and a device whose generator cannot be captured.
    pub fn try_forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.segment.run(&self.inner, xs, |module, xs| module.forward(xs))
    }
}

impl<M: ModuleT + 'static> ActivationCheckpoint<M, WithTrain> {
    /// Wraps a module with a train flag, which the recompute sees as forward did.
    pub fn with_train(module: M) -> Self {
        Self::wrap(module)
    }

    /// As `forward_t`, with errors as values.
    ///
    /// # Errors
    /// What the module panics with, and a device whose generator cannot be captured.
    pub fn try_forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.segment.run(&self.inner, xs, move |module, xs| module.forward_t(xs, train))
    }
}

impl<M: Send, K> ActivationCheckpoint<M, K> {
    fn wrap(module: M) -> Self {
        let name = std::any::type_name::<M>().rsplit("::").next().unwrap_or_default();
        Self { inner: Shared::new(module), segment: Segment::named(name), kind: PhantomData }
    }

    /// Names the segment in errors; the default is the module's type.
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.segment = self.segment.renamed(name);
        self
    }

    /// Compares every saved tensor's bytes between forward and recompute; see
    /// [`Segment::checked`].
    pub fn checked(mut self) -> Self {
        self.segment = self.segment.checked();
        self
    }

    /// Sets when a recompute ends.
    pub fn early_stop(mut self, early_stop: EarlyStop) -> Self {
        self.segment = self.segment.early_stop(early_stop);
        self
    }

    /// Lends the module.
    ///
    /// # Errors
    /// Those of [`Shared::with`].
    pub fn with<R>(&self, f: impl FnOnce(&M) -> R) -> Result<R> {
        self.inner.with(f)
    }

    /// The module, where no graph still needs it; else the wrapper.
    ///
    /// # Errors
    /// The wrapper itself.
    pub fn into_inner(self) -> Result<M, Self> {
        let Self { inner, segment, kind } = self;
        inner.into_inner().map_err(|inner| Self { inner, segment, kind })
    }

    /// The segment's name.
    pub fn name(&self) -> &str {
        self.segment.name()
    }

    /// How many recomputes have run.
    pub fn recomputes(&self) -> u64 {
        self.segment.recomputes()
    }
}

impl<M: Module + 'static> Module for ActivationCheckpoint<M, Plain> {
    fn forward(&self, xs: &Tensor) -> Tensor {
        self.try_forward(xs).unwrap_or_else(|error| unwind(error))
    }
}

impl<M: ModuleT + 'static> ModuleT for ActivationCheckpoint<M, WithTrain> {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        self.try_forward_t(xs, train).unwrap_or_else(|error| unwind(error))
    }
}
