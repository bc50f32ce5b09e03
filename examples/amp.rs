//! Mixed precision: arithmetic in bf16, weights and their updates in fp32.

use memfit::optim::{AdamW, AdamWConfig};
use memfit::strategies::AmpScaler;
use memfit::tch::{self, Device, Kind, Tensor, nn, nn::Module};
use memfit::{Loss, Stack, StepOutcome};

fn main() -> memfit::Result<()> {
    tch::manual_seed(0);
    let vs = nn::VarStore::new(Device::cuda_if_available());
    let model = nn::seq()
        .add(nn::linear(vs.root() / "in", 16, 64, Default::default()))
        .add_fn(|xs| xs.relu())
        .add(nn::linear(vs.root() / "out", 64, 1, Default::default()));

    // bf16 needs no loss scale. fp16 does: `AmpScaler::fp16()` finds it, and a step whose
    // gradients overflow comes back as `Skipped`.
    let mut training =
        Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default().lr(1e-2))?).with(AmpScaler::bf16()).build()?;

    for step in 0..100 {
        let xs = Tensor::f_randn([32, 16], (Kind::Float, vs.device()))?;
        let outcome = training.step_with(|| {
            let wanted = xs.f_sum_dim_intlist([1_i64].as_slice(), true, Kind::Float)?;
            let error = model.forward(&xs).f_to_kind(Kind::Float)?.f_sub(&wanted)?;
            Ok(Loss::of(error.f_square()?.f_mean(Kind::Float)?))
        })?;
        match outcome {
            StepOutcome::Stepped { loss, .. } if step % 20 == 0 => {
                println!("step {step}: loss {:.3}", loss.double_value(&[]));
            }
            StepOutcome::Skipped { reason, .. } => println!("step {step}: {reason:?}"),
            _ => {}
        }
    }
    Ok(())
}
