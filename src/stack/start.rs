use tch::{Device, Tensor};

use crate::error::Result;
use crate::ffi;
use crate::rng::Generators;
use crate::state::Named;

/// The buffers and generators of a moment, to go back to. The copies are allocated once.
#[derive(Debug)]
pub(super) struct Start {
    device: Device,
    copies: Vec<Tensor>,
    generators: Option<Generators>,
}

impl Start {
    pub(super) fn new(buffers: &[Named], device: Device) -> Result<Self> {
        let copies = buffers.iter().map(|buffer| buffer.tensor.f_detach()?.f_empty_like());
        Ok(Self { device, copies: copies.collect::<Result<_, _>>()?, generators: None })
    }

    /// Remembers this moment.
    pub(super) fn remember(&mut self, buffers: &[Named]) -> Result<()> {
        for (copy, buffer) in self.copies.iter().zip(buffers) {
            ffi::tensor::put_back(copy, &buffer.tensor)?;
        }
        self.generators = Some(Generators::capture(self.device)?);
        Ok(())
    }

    /// Goes back to the moment remembered last.
    pub(super) fn go_back(&self, buffers: &[Named]) -> Result<()> {
        let Some(generators) = &self.generators else { return Ok(()) };
        for (copy, buffer) in self.copies.iter().zip(buffers) {
            ffi::tensor::put_back(&buffer.tensor, copy)?;
        }
        generators.restore()
    }

    /// The copies, in the order of the buffers.
    pub(super) fn copies(&self) -> &[Tensor] {
        &self.copies
    }

    pub(super) fn generators(&self) -> Option<&Generators> {
        self.generators.as_ref()
    }

    /// Is from now on what a snapshot says; a copy that was not saved stays.
    pub(super) fn replace(&mut self, copies: Vec<Option<Tensor>>, generators: Option<Generators>) {
        for (copy, saved) in self.copies.iter_mut().zip(copies) {
            if let Some(saved) = saved {
                *copy = saved;
            }
        }
        self.generators = generators;
    }

    /// The buffer that changed since, if any. Reads the device.
    pub(super) fn changed<'a>(&self, buffers: &'a [Named]) -> Option<&'a str> {
        let mut pairs = self.copies.iter().zip(buffers);
        pairs
            .find(|(copy, buffer)| !copy.f_equal(&buffer.tensor).unwrap_or(true))
            .map(|(_, buffer)| buffer.name.as_str())
    }
}
