//! All four strategies on one model, in one loop.

mod gpt;

use memfit::optim::{AdamW, AdamWConfig};
use memfit::strategies::{AmpScaler, Budget, Cosine, GradAccumulator, GradClip};
use memfit::tch::{self, Device, nn};
use memfit::{CpuOffload, Loss, Stack, StepOutcome};

use gpt::{Config, Failure, Gpt, Recompute, Text};

fn main() -> Result<(), Failure> {
    tch::manual_seed(0);
    let config = Config::small();
    let text = Text::of_this_project(config.context)?;
    let folder = std::env::temp_dir();

    // `Gpt::new` puts each block behind `ActivationCheckpoint::with_train`.
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), &config, Recompute::Every(1));

    let optimizer = AdamW::new(&vs, AdamWConfig::default().lr(2e-3))?;
    let mut training = Stack::of(&vs, CpuOffload::optimizer(optimizer).disk(&folder)?)
        .with(AmpScaler::bf16())
        .with(GradAccumulator::every(4))
        .with(GradClip::norm(1.0))
        .with(CpuOffload::activations().disk(&folder))
        .with(Cosine::new(30).warm_up(3))
        .with(Budget::parse("32MiB")?)
        .build()?;
    println!("{training}\n");

    let mut loader = text.loader(&config, 0, 1)?;
    for micro in training.try_windows(loader.by_ref().take(120)) {
        let outcome =
            training.step(micro?, |batch| Ok(Loss::mean(model.loss(batch, true), batch.0.numel())))?;
        if let StepOutcome::Stepped { loss, peak, lr, .. } = outcome {
            let step = training.position().steps;
            if step % 5 == 0 {
                let (loss, peak) = (loss.double_value(&[]), peak as f64 / 1e6);
                println!("step {step}: loss {loss:.3}, peak {peak:.2} MB, lr {:.1e}", lr[0]);
            }
        }
    }
    Ok(())
}
