//! Gradient accumulation: one update from several micro-batches, exact for unequal ones.

use memfit::optim::{Sgd, SgdConfig};
use memfit::strategies::GradAccumulator;
use memfit::tch::{self, Device, Kind, Tensor, nn, nn::Module};
use memfit::{Loss, Stack, StepOutcome};

fn main() -> memfit::Result<()> {
    tch::manual_seed(0);
    let vs = nn::VarStore::new(Device::cuda_if_available());
    let model = nn::linear(vs.root(), 8, 1, Default::default());
    let mut training = Stack::of(&vs, Sgd::new(&vs, SgdConfig::default().lr(0.05))?)
        .with(GradAccumulator::every(4))
        .build()?;

    // Ten micro-batches, the last one short: windows of 4, 4 and 2.
    let rows = [8, 8, 8, 8, 8, 8, 8, 8, 8, 3];
    let batches = rows.map(|rows| Tensor::randn([rows, 8], (Kind::Float, vs.device())));
    for micro in training.windows(batches) {
        let outcome = training.step(micro?, |xs| {
            let error =
                model.forward(xs).f_sub(&xs.f_sum_dim_intlist([1_i64].as_slice(), true, Kind::Float)?)?;
            // The weight makes the short window and the short micro-batch count for what they are.
            Ok(Loss::mean(error.f_square()?.f_mean(Kind::Float)?, xs.size()[0]))
        })?;
        match outcome {
            StepOutcome::Stepped { loss, tokens, .. } => {
                println!("stepped on {tokens} rows: loss {:.3}", loss.double_value(&[]));
            }
            other => println!("{other:?}"),
        }
    }
    // The other way in: one whole batch, split by the stack.
    let batch = Tensor::randn([30, 8], (Kind::Float, vs.device()));
    let outcome = training.step_batch(&batch, |xs| {
        Ok(Loss::mean(model.forward(xs).f_square()?.f_mean(Kind::Float)?, xs.size()[0]))
    })?;
    println!("{outcome:?}");
    Ok(())
}
