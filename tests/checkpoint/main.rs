//! Recompute regions: gradients as without, bytes and recomputes as promised.

mod cost;
mod gradients;
mod misuse;
mod replay;
#[path = "../support/mod.rs"]
mod support;

use memfit::checkpoint::{ActivationCheckpoint, EarlyStop, Segment, Shared, checkpoint};
use memfit::memory;
use memfit::{Error, tch};
use support::{live, same, serial};
use tch::nn::{self, Module, ModuleT};
use tch::{Device, IndexOp, Kind, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn leaf(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, FLOAT).set_requires_grad(true)
}

fn backward(y: &Tensor) -> memfit::Result<()> {
    y.f_backward().map_err(Error::from)
}

/// A block with weights of its own that runs any function over them.
#[derive(Debug)]
struct Block {
    weights: Vec<Tensor>,
    body: fn(&[Tensor], &Tensor) -> Tensor,
}

impl Module for Block {
    fn forward(&self, xs: &Tensor) -> Tensor {
        (self.body)(&self.weights, xs)
    }
}

fn clones(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(Tensor::shallow_clone).collect()
}

/// One training pass: the output, the gradients of the input and of the weights, and what
/// the generator gives next.
fn pass(forward: &dyn Fn(&Tensor) -> Tensor, x: &Tensor, weights: &[Tensor]) -> Vec<Tensor> {
    tch::manual_seed(7);
    let x = x.detach().copy().set_requires_grad(x.requires_grad());
    let y = forward(&x);
    let loss = (&y * y.detach().cos()).sum(Kind::Float);
    loss.backward();
    let mut all = vec![y.detach().copy()];
    for tensor in weights.iter().chain([&x]) {
        let mut tensor = tensor.shallow_clone();
        if tensor.grad().defined() {
            all.push(tensor.grad().copy());
            tensor.zero_grad();
        }
    }
    all.push(Tensor::rand([4], FLOAT));
    all
}

/// Asserts that a segment gives the same bits plain and under every setting.
fn assert_same(what: &str, x: &Tensor, weights: Vec<Tensor>, body: fn(&[Tensor], &Tensor) -> Tensor) {
    let plain = Block { weights: clones(&weights), body };
    let right = pass(&|x| plain.forward(x), x, &weights);
    for early_stop in [EarlyStop::On, EarlyStop::Off] {
        let block = ActivationCheckpoint::new(Block { weights: clones(&weights), body })
            .named(what)
            .early_stop(early_stop)
            .checked();
        let got = pass(&|x| block.forward(x), x, &weights);
        assert!(same(&got, &right), "{what} with early stop {early_stop:?}");
    }
}
