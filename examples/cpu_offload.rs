//! Moves saved activations and optimizer state to disk, and shows what it saves.
//!
//! `cargo run --release --example cpu_offload`

use memfit::memory::{self, Bytes};
use memfit::optim::{AdamW, AdamWConfig};
use memfit::tch::nn::{self, Module};
use memfit::tch::{Device, Kind, Tensor};
use memfit::{CpuOffload, Loss, Result, Stack};

const WIDTH: i64 = 256;

fn model(vs: &nn::VarStore) -> nn::Sequential {
    (0..8).fold(nn::seq(), |model, index| {
        let path = vs.root() / index;
        model
            .add(nn::linear(&path / "up", WIDTH, 4 * WIDTH, Default::default()))
            .add_fn(|x| x.gelu("tanh"))
            .add(nn::linear(&path / "down", 4 * WIDTH, WIDTH, Default::default()))
    })
}

/// Trains for three steps; the last loss and the peak of the last step.
fn train(offload: bool) -> Result<(f64, u64)> {
    memfit::tch::manual_seed(0);
    let vs = nn::VarStore::new(Device::Cpu);
    let model = model(&vs);
    let optimizer = AdamW::new(&vs, AdamWConfig::default().lr(1e-4))?;
    let folder = std::env::temp_dir();
    let mut training = if offload {
        let activations = CpuOffload::activations().disk(&folder);
        Stack::of(&vs, CpuOffload::optimizer(optimizer).disk(&folder)?).with(activations).build()?
    } else {
        Stack::of(&vs, optimizer).build()?
    };
    let x = Tensor::randn([512, WIDTH], (Kind::Float, Device::Cpu));
    let (mut last, mut peak) = (0.0, 0);
    for _ in 0..3 {
        let outcome = training.step_with(|| {
            let loss = (model.forward(&x) - &x).square().mean(Kind::Float);
            Ok(Loss::mean(loss, 512))
        })?;
        if let memfit::StepOutcome::Stepped { loss, peak: highest, .. } = outcome {
            (last, peak) = (loss.double_value(&[]), highest);
        }
    }
    println!("{training}");
    Ok((last, peak))
}

fn main() -> Result<()> {
    let (plain_loss, plain) = train(false)?;
    let (loss, peak) = train(true)?;
    println!("plain: loss {plain_loss:.6}, peak {}", Bytes(plain));
    println!("offloaded: loss {loss:.6}, peak {}", Bytes(peak));
    println!("same bits: {}", plain_loss == loss);
    println!("{}", memory::summary());
    Ok(())
}
