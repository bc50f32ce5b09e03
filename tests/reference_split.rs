//! The example's reference workload in a budget that its whole batch does not fit in.

#[path = "../examples/gpt/mod.rs"]
mod gpt;
mod support;

use std::sync::{Arc, Mutex};

use gpt::{Config, Gpt, Recompute};
use memfit::optim::{AdamW, AdamWConfig};
use memfit::step::{NextUpdate, UpdatePhase, Verdict};
use memfit::strategies::{Budget, MicroBatcher};
use memfit::tch::{Device, Kind, Tensor, nn};
use memfit::{Loss, Place, Relation, Result, Split, Stack, StepOutcome, Strategy};
use support::serial;

/// Copies the gradients of an update to memory that libtorch does not count.
#[derive(Debug)]
struct Gradients(Arc<Mutex<Vec<Vec<f32>>>>);

impl Strategy for Gradients {
    fn place(&self) -> Place {
        Place::Watch
    }

    fn relation(&self, _other: &dyn Strategy) -> Relation {
        Relation::Before
    }

    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        let divisor = phase.update.divisor as f32;
        let parameters = phase.optimizer.groups().iter().flat_map(|group| group.parameters());
        *self.0.lock().unwrap() = parameters
            .map(|named| numbers(&named.tensor.grad()).into_iter().map(|number| number / divisor).collect())
            .collect();
        next(phase)
    }
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor.contiguous().view(-1).try_into().unwrap()
}

fn norm(numbers: impl Iterator<Item = f64>) -> f64 {
    numbers.map(|number| number * number).sum::<f64>().sqrt()
}

/// Case 51, and what `cargo xtask demo --micro-batch auto --dropout 0` does.
#[test]
fn within_270_mb_it_finds_4_rows_and_the_gradient_is_the_whole_batch_s() {
    let _guard = serial();
    let config = Config { dropout: 0.0, ..Config::reference() };
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), &config, Recompute::Never);
    let rows = Tensor::randint(256, [config.batch, config.context + 1], (Kind::Int64, Device::Cpu));
    let batch = (rows.narrow(1, 0, config.context), rows.narrow(1, 1, config.context).contiguous());

    let loss = model.loss(&batch, true);
    loss.backward();
    let whole_loss = loss.double_value(&[]);
    drop(loss);
    let whole: Vec<Vec<f32>> = vs.trainable_variables().iter().map(|w| numbers(&w.grad())).collect();

    let seen = Arc::new(Mutex::new(Vec::new()));
    let mut training = Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default().lr(3e-4)).unwrap())
        .with(MicroBatcher::new())
        .with(Budget::bytes(270_000_000))
        .with(Gradients(seen.clone()))
        .build()
        .unwrap();
    let outcome = training
        .step_batch(&batch, |micro| Ok(Loss::mean(model.loss(micro, true), micro.0.numel())))
        .unwrap();
    let StepOutcome::Stepped { loss, split, peak, .. } = outcome else { panic!("{outcome:?}") };
    assert_eq!(split, Some(Split { batch: 16, rows: 4, micro_batches: 4, retries: 2 }));
    assert!(peak <= 270_000_000, "{peak}");
    assert!((loss.double_value(&[]) - whole_loss).abs() <= 1e-6 * whole_loss);

    let split = seen.lock().unwrap();
    let pairs = || whole.iter().flatten().zip(split.iter().flatten());
    assert_eq!(pairs().count(), whole.iter().map(Vec::len).sum::<usize>());
    let apart = |(a, b): (&f32, &f32)| f64::from(*a) - f64::from(*b);
    let largest = pairs().map(apart).fold(0.0, |most: f64, d| most.max(d.abs()));
    let relative = norm(pairs().map(apart)) / norm(pairs().map(|(a, _)| f64::from(*a)));
    assert!(largest <= 1e-6 && relative <= 1e-6, "largest difference {largest:e}, of the norm {relative:e}");
}
