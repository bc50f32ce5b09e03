use std::marker::PhantomData;
use std::path::Path;
use std::sync::Arc;

use tch::nn::{Module, ModuleT};
use tch::{Device, Tensor};

use super::activations::no_tier;
use super::carrier::Carrier;
use super::disk::Disk;
use super::moved::{Moved, Observer};
use super::weights::{Hold, Weights};
use crate::error::{Error, Result};
use crate::optim::Parameters;
use crate::step::unwind;

/// The wrapped module is a [`Module`]: it has no train flag.
#[derive(Clone, Copy, Debug)]
pub struct Plain;

/// The wrapped module is a [`ModuleT`].
#[derive(Clone, Copy, Debug)]
pub struct WithTrain;

/// A module whose weights will live elsewhere; made by
/// [`CpuOffload::parameters`](super::CpuOffload::parameters).
#[derive(Debug)]
#[must_use = "say where the weights live: `.disk(folder)?` or `.host()?`"]
pub struct WeightsHome<M, K = Plain> {
    inner: M,
    weights: Vec<Tensor>,
    kind: PhantomData<fn() -> K>,
}

impl<M> WeightsHome<M, Plain> {
    pub(super) fn new<P: Parameters + ?Sized>(inner: M, weights: &P) -> Self {
        let weights = weights.named().into_iter().map(|named| named.tensor).collect();
        Self { inner, weights, kind: PhantomData }
    }

    /// For a module with a train flag: the wrapper is a [`ModuleT`] then.
    pub fn with_train(self) -> WeightsHome<M, WithTrain> {
        WeightsHome { inner: self.inner, weights: self.weights, kind: PhantomData }
    }
}

impl<M, K> WeightsHome<M, K> {
    /// The weights live in a temporary file in this folder, reserved at full size now.
    ///
    /// # Errors
    /// [`Error::Io`] for an unusable folder or a full disk: the weights are in memory then.
    pub fn disk(self, folder: impl AsRef<Path>) -> Result<ParameterOffload<M, K>> {
        let disk = Disk::new(folder.as_ref())?;
        self.with_carrier(Carrier::new(Some(disk), 0))
    }

    /// The weights, on CUDA, live in pinned host memory.
    ///
    /// # Errors
    /// [`Error::Incompatible`] where they are on the CPU.
    pub fn host(self) -> Result<ParameterOffload<M, K>> {
        if let Some(weight) = self.weights.iter().find(|weight| weight.device() == Device::Cpu) {
            return Err(no_tier("CpuOffload::parameters(…).host()", weight.device()));
        }
        self.with_carrier(Carrier::new(None, u64::MAX))
    }

    fn with_carrier(self, carrier: Carrier) -> Result<ParameterOffload<M, K>> {
        if let Some(weight) = self.weights.iter().find(|weight| !weight.is_leaf()) {
            let problem = format!("a tensor of shape {:?} is computed from others", weight.size());
            return Err(Error::config("parameters", problem));
        }
        let observer = Observer::default();
        let carrier = Arc::new(carrier);
        observer.watch(&carrier);
        let weights = Weights::new(&self.weights, carrier, observer.clone())?;
        Ok(ParameterOffload { inner: self.inner, weights, observer, kind: PhantomData })
    }
}

/// A module whose weights visit memory for its forward, its backward, a recompute and the
/// update.
///
/// They come before each forward and before the backward of the output, and leave when the
/// last gradient of the pass is final. While they are away, reading one is an error; shape,
/// device, identity and version stay. Gradients stay in memory. The update needs
/// [`CpuOffload::optimizer`](super::CpuOffload::optimizer) around the optimizer, which brings
/// them one at a time; others refuse before anything moves.
#[derive(Debug)]
pub struct ParameterOffload<M, K = Plain> {
    inner: M,
    weights: Arc<Weights>,
    observer: Observer,
    kind: PhantomData<fn() -> K>,
}

/// Keeps the weights of a [`ParameterOffload`] in memory.
#[derive(Debug)]
#[must_use = "the weights leave when this is dropped"]
pub struct Present {
    hold: Hold,
}

impl Present {
    /// Lets the weights go, changed ones written home.
    ///
    /// # Errors
    /// [`Error::Io`]; the weights stay in memory.
    pub fn end(self) -> Result<()> {
        self.hold.end()
    }
}

impl<M, K> ParameterOffload<M, K> {
    /// The module; its weights may be away.
    pub fn get_ref(&self) -> &M {
        &self.inner
    }

    /// The module; its weights may be away.
    pub fn get_mut(&mut self) -> &mut M {
        &mut self.inner
    }

    /// The module, with its weights in memory for good.
    pub fn into_inner(self) -> M {
        self.inner
    }

    /// Brings the weights into memory while the guard lives: to read, save or change them.
    ///
    /// # Errors
    /// [`Error::Io`], out of memory.
    pub fn present(&self) -> Result<Present> {
        Ok(Present { hold: self.weights.hold_all()? })
    }

    /// What was carried so far.
    pub fn moved(&self) -> Moved {
        self.observer.moved()
    }

    /// A handle that watches it after it went into a model.
    pub fn observer(&self) -> Observer {
        self.observer.clone()
    }

    fn pass(&self, xs: &Tensor, forward: impl FnOnce(&M) -> Tensor) -> Result<Tensor> {
        let hold = self.weights.hold_all()?;
        let output = forward(&self.inner);
        self.weights.watch(xs, &output)?;
        hold.end()?;
        Ok(output)
    }
}

impl<M: Module> ParameterOffload<M, Plain> {
    /// As `forward`, with errors as values.
    ///
    /// # Errors
    /// [`Error::Io`], out of memory.
    pub fn try_forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.pass(xs, |inner| inner.forward(xs))
    }
}

impl<M: ModuleT> ParameterOffload<M, WithTrain> {
    /// As `forward_t`, with errors as values.
    ///
    /// # Errors
    /// [`Error::Io`], out of memory.
    pub fn try_forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.pass(xs, |inner| inner.forward_t(xs, train))
    }
}

impl<M: Module> Module for ParameterOffload<M, Plain> {
    fn forward(&self, xs: &Tensor) -> Tensor {
        self.try_forward(xs).unwrap_or_else(|error| unwind(error))
    }
}

impl<M: ModuleT> ModuleT for ParameterOffload<M, WithTrain> {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        self.try_forward_t(xs, train).unwrap_or_else(|error| unwind(error))
    }
}
