//! What every test file needs.
#![allow(dead_code)]

pub mod family;
pub mod process;
pub mod random;
pub mod waiting;

use std::sync::{Mutex, MutexGuard, PoisonError};

use memfit::optim::{Sgd, SgdConfig};
use memfit::tch::{Device, Kind, Tensor, nn};

static PROCESS: Mutex<()> = Mutex::new(());

/// The allocator, the default generator and the engine's hook belong to the whole process:
/// one test at a time, each from the same seed.
pub fn serial() -> MutexGuard<'static, ()> {
    let guard = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    // On a busy machine libtorch's threads wait for each other longer than they compute.
    memfit::tch::set_num_threads(1);
    memfit::tch::manual_seed(0);
    guard
}

/// The largest absolute difference.
pub fn difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    if a.numel() == 0 {
        return 0.0;
    }
    (a.to_kind(Kind::Double) - b.to_kind(Kind::Double)).abs().max().double_value(&[])
}

/// Whether two lists of tensors hold the same bits.
pub fn same(a: &[Tensor], b: &[Tensor]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.equal(b))
}

/// Copies of tensors, detached.
pub fn copies(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(|tensor| tensor.detach().copy()).collect()
}

/// Sets a tensor's gradient by hand: a first backward makes room, then its bytes change.
pub fn set_grad(tensor: &Tensor, grad: &Tensor) {
    if !tensor.grad().defined() {
        (tensor * 0.0).sum(Kind::Float).backward();
    }
    memfit::tch::no_grad(|| tensor.grad().copy_(grad));
}

/// Live bytes in libtorch's CPU allocator.
pub fn live() -> u64 {
    memfit::memory::stats(memfit::tch::Device::Cpu).map(|stats| stats.current).unwrap_or_default()
}

/// One weight vector; with [`sgd`] its change is minus the gradient.
pub fn vector(n: i64) -> (nn::VarStore, Tensor) {
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().zeros("w", &[n]);
    (vs, w)
}

/// Plain SGD with rate 1.
pub fn sgd(vs: &nn::VarStore) -> Sgd {
    Sgd::new(vs, SgdConfig::default().lr(1.0)).unwrap()
}

/// A loss whose gradient is `g`, whatever the weights.
pub fn slope(w: &Tensor, g: &[f32]) -> Tensor {
    (w * Tensor::from_slice(g)).sum(Kind::Float)
}

/// The elements of a tensor.
pub fn values(t: &Tensor) -> Vec<f64> {
    Vec::<f64>::try_from(t.detach().to_kind(Kind::Double).view(-1)).unwrap()
}
