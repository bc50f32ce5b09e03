//! Activation checkpointing in a plain tch loop: the peak with and without.
//!
//! `cargo run --release --example activation_checkpoint`

use memfit::tch::nn::{self, Module, OptimizerConfig};
use memfit::tch::{self, Device, Kind, Tensor};
use memfit::{ActivationCheckpoint, memory};

const WIDTH: i64 = 128;
const BLOCKS: i64 = 8;

fn main() -> memfit::Result<()> {
    let (plain, plain_loss) = train(|block| nn::seq().add(block))?;
    let (wrapped, wrapped_loss) = train(|block| nn::seq().add(ActivationCheckpoint::new(block)))?;
    println!("plain:        peak {:.1} MB, loss {plain_loss:.6}", plain as f64 / 1e6);
    println!("checkpointed: peak {:.1} MB, loss {wrapped_loss:.6}", wrapped as f64 / 1e6);
    Ok(())
}

/// A block as you have it already.
fn block(path: &nn::Path) -> nn::Sequential {
    nn::seq()
        .add(nn::linear(path / "up", WIDTH, 4 * WIDTH, Default::default()))
        .add_fn(|xs| xs.gelu("none"))
        .add(nn::linear(path / "down", 4 * WIDTH, WIDTH, Default::default()))
}

/// Trains ten steps; returns the highest live bytes and the last loss.
fn train(wrap: impl Fn(nn::Sequential) -> nn::Sequential) -> memfit::Result<(u64, f64)> {
    tch::manual_seed(0);
    let vs = nn::VarStore::new(Device::Cpu);
    let mut model = nn::seq();
    for index in 0..BLOCKS {
        model = model.add(wrap(block(&(vs.root() / index))));
    }
    let mut optimizer = nn::AdamW::default().build(&vs, 1e-3)?;
    let (xs, ys) = (rows(1), rows(2));

    let (loss, peak) = memory::peak_of(Device::Cpu, || {
        let mut last = f64::NAN;
        for _ in 0..10 {
            let loss = model.forward(&xs).mse_loss(&ys, tch::Reduction::Mean);
            optimizer.backward_step(&loss);
            last = loss.double_value(&[]);
        }
        last
    })?;
    Ok((peak, loss))
}

fn rows(seed: i64) -> Tensor {
    tch::manual_seed(seed);
    Tensor::randn([1024, WIDTH], (Kind::Float, Device::Cpu))
}
