//! What recording every allocation with its role adds to a training step (wanted: 1 %), and to
//! one allocation (wanted: 0.1 µs).

#[path = "../examples/gpt/mod.rs"]
mod gpt;
mod support;

use std::time::Instant;

use gpt::{Config, Gpt, Recompute};
use memfit::memory::Recording;
use memfit::optim::{AdamW, AdamWConfig};
use memfit::strategies::MemoryTimeline;
use memfit::tch::{Device, Kind, Tensor, nn};
use memfit::{Loss, Stack};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Watch {
    Off,
    On,
}

struct Subject {
    vs: nn::VarStore,
    model: Gpt,
    batch: (Tensor, Tensor),
}

impl Subject {
    fn new(config: &Config, recompute: Recompute) -> Self {
        let vs = nn::VarStore::new(Device::Cpu);
        let model = Gpt::new(&vs.root(), config, recompute);
        let rows = Tensor::randint(256, [config.batch, config.context + 1], (Kind::Int64, Device::Cpu));
        let (inputs, targets) =
            (rows.narrow(1, 0, config.context), rows.narrow(1, 1, config.context).contiguous());
        Self { vs, model, batch: (inputs, targets) }
    }

    /// Seconds of each of `steps` steps of a fresh stack, after two that warm it up.
    fn steps(&self, steps: usize, watch: Watch) -> Vec<f64> {
        let builder =
            Stack::of(&self.vs, AdamW::new(&self.vs, AdamWConfig::default()).expect("an optimizer"));
        let builder = if watch == Watch::On { builder.with(MemoryTimeline::new()) } else { builder };
        let mut training = builder.build().expect("a stack");
        let mut step = || {
            let start = Instant::now();
            let loss = || Ok(Loss::of(self.model.loss(&self.batch, true)));
            assert!(training.step_with(loss).expect("a step").stepped());
            start.elapsed().as_secs_f64()
        };
        (0..steps + 2).map(|_| step()).skip(2).collect()
    }
}

/// A tenth of the values are below it: what a step takes where nothing else disturbs it.
fn low(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 10).copied().unwrap_or(f64::NAN)
}

/// Time of a step with recording and without, in seconds; turns alternate.
fn compare(subject: &Subject, turns: usize, steps: usize) -> (f64, f64) {
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for turn in 0..turns {
        let order = if turn % 2 == 0 { [Watch::Off, Watch::On] } else { [Watch::On, Watch::Off] };
        for watch in order {
            let times = if watch == Watch::On { &mut with } else { &mut without };
            times.extend(subject.steps(steps, watch));
        }
    }
    (low(with), low(without))
}

/// Microseconds of one allocation and its free.
fn pair_of_events(runs: usize) -> f64 {
    let start = Instant::now();
    (0..runs).for_each(|_| drop(Tensor::empty([16], (Kind::Float, Device::Cpu))));
    start.elapsed().as_secs_f64() * 1e6 / runs as f64
}

fn main() {
    let measures = support::measures();
    let small = Config { dropout: 0.0, ..Config::small() };
    let subjects =
        [("small model", small, Recompute::Never), ("small model, checkpointed", small, Recompute::Every(1))];
    let (turns, steps) = if measures { (60, 12) } else { (1, 1) };
    memfit::tch::set_num_threads(1);
    for (name, config, recompute) in subjects {
        let subject = Subject::new(&config, recompute);
        let (with, without) = compare(&subject, turns, steps);
        let (ratio, added) = (with / without, (with - without) * 1e6);
        println!(
            "{name}: a step takes {ratio:.4} of its time without recording, {added:+.1} µs of {:.2} ms",
            without * 1e3
        );
    }
    let runs = if measures { 200_000 } else { 10 };
    let mut added: Vec<f64> = (0..9)
        .map(|_| {
            let without = pair_of_events(runs);
            let recording = Recording::start().expect("a recording");
            let with = pair_of_events(runs);
            drop(recording);
            (with - without) / 2.0
        })
        .collect();
    added.sort_by(f64::total_cmp);
    println!("an event takes {:.3} µs", added[added.len() / 2]);
}
