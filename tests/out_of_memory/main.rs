//! Running out of memory: the split is right, nothing is lost, and the end is explained.

mod explain;
mod failure;
mod search;
mod split;
#[path = "../support/mod.rs"]
mod support;
#[path = "../support/training.rs"]
mod training;

use std::sync::{Arc, Mutex};

use memfit::checkpoint::ActivationCheckpoint;
use memfit::memory::{FailAt, Limit, Role, peak_of};
use memfit::optim::{AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, Optimizer, Sgd, SgdConfig};
use memfit::strategies::{
    AmpScaler, GradAccumulator, GradClip, MasterWeights, MicroBatcher, Rollback, Search,
};
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};
use memfit::{
    CpuOffload, Error, Failure, Loss, Place, Recovery, Result, Split, Stack, StackBuilder, State, Strategy,
    Value, find_max_batch,
};
use support::{copies, difference, live, serial, values};
use training::difference_of;

const WIDTH: i64 = 64;

fn floats(size: &[i64]) -> Tensor {
    Tensor::randn(size, (Kind::Float, Device::Cpu))
}

/// Memory ran out, says the test: really asking for too much may end the process where the
/// system promises more than it has.
fn shrunk(_rows: i64) -> Error {
    Error::OutOfMemory { requested: Some(1 << 42), live: None, limit: None, device: Device::Cpu }
}

/// A model that mixes no rows and draws nothing.
struct Net {
    vs: nn::VarStore,
    first: nn::Linear,
    last: nn::Linear,
}

impl Net {
    fn new() -> Self {
        memfit::tch::manual_seed(5);
        let vs = nn::VarStore::new(Device::Cpu);
        let first = nn::linear(vs.root() / "first", WIDTH, WIDTH, Default::default());
        let last = nn::linear(vs.root() / "last", WIDTH, 1, Default::default());
        Self { vs, first, last }
    }

    fn loss(&self, x: &Tensor) -> Loss {
        let _segment = memfit::memory::segment("the block");
        let y = x.apply(&self.first).tanh().exp().tanh().apply(&self.last).square();
        Loss::mean(y.mean(Kind::Float), x.size()[0])
    }

    fn weights(&self) -> Vec<Tensor> {
        copies(&self.vs.trainable_variables())
    }

    fn stack(&self) -> Stack {
        let sgd = Sgd::new(&self.vs, SgdConfig::default().lr(0.05)).unwrap();
        Stack::of(&self.vs, sgd).with(MicroBatcher::new()).build().unwrap()
    }

    /// One step by hand, in micro-batches of so many rows.
    fn by_hand(&self, x: &Tensor, rows: i64) {
        let all = x.size()[0];
        let mut start = 0;
        while start < all {
            let here = rows.min(all - start);
            let loss = self.loss(&x.narrow(0, start, here));
            (loss.tensor() * (here as f64 / all as f64)).backward();
            start += here;
        }
        memfit::tch::no_grad(|| {
            for mut w in self.vs.trainable_variables() {
                w -= w.grad() * 0.05;
                w.zero_grad();
            }
        });
    }
}

/// A training with BatchNorm, dropout, moments and a loss scale.
fn whole_state(seed: i64) -> (nn::VarStore, training::Net, Stack) {
    whole_state_with(seed, |builder| builder)
}

fn whole_state_with(
    seed: i64,
    with: impl FnOnce(StackBuilder) -> StackBuilder,
) -> (nn::VarStore, training::Net, Stack) {
    memfit::tch::manual_seed(seed);
    let vs = nn::VarStore::new(Device::Cpu);
    let net = training::Net::new(&vs.root());
    let adamw = AdamW::new(&vs, AdamWConfig::default().lr(0.01)).unwrap();
    let builder = Stack::of(&vs, adamw)
        .with(MicroBatcher::new())
        .with(AmpScaler::fp16_with(|config| config.init_scale = 64.0).unwrap());
    let stack = with(builder).build().unwrap();
    (vs, net, stack)
}

fn state(stack: &mut Stack) -> State {
    stack.state().unwrap()
}

/// Nothing else than what `MicroBatcher` has learned.
fn only_the_size_differs(a: &State, b: &State) {
    let other = |(name, _): &(&str, _)| !name.starts_with("splitting.");
    let (mut left, mut right) = (a.iter().filter(other), b.iter().filter(other));
    loop {
        match (left.next(), right.next()) {
            (None, None) => return,
            (Some((name, a)), Some((other, b))) => {
                assert_eq!(name, other);
                match (a, b) {
                    (Value::Tensor(a), Value::Tensor(b)) => assert!(training::same_bits(a, b), "{name}"),
                    (a, b) => assert_eq!(format!("{a:?}"), format!("{b:?}"), "{name}"),
                }
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Notes each failure: its micro-batch, and whether backward had begun.
#[derive(Clone, Debug, Default)]
struct Spy(Arc<Mutex<Vec<(usize, bool)>>>);

impl Spy {
    fn seen(&self) -> Vec<(usize, bool)> {
        self.0.lock().unwrap().clone()
    }
}

impl Strategy for Spy {
    fn identity(&self) -> Option<String> {
        None
    }
    fn place(&self) -> Place {
        Place::Watch
    }
    fn recover(&mut self, failure: &Failure<'_>) -> Recovery {
        self.0.lock().unwrap().push((failure.micro, failure.in_backward));
        Recovery::Window
    }
}
