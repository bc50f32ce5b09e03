//! Why: what the plain loop takes, and what each stack takes instead.

use std::time::Instant;

use memfit::memory;
use memfit::tch::{Device, nn, nn::OptimizerConfig};

use crate::gpt::{Amp, Choice, Config, Failure, Gpt, Plan, Recompute, Rows, Split, Text};

/// Peak bytes and the fastest step's milliseconds.
struct Measured {
    peak: u64,
    milliseconds: f64,
}

/// Prints one row per stack, each measured over a few steps without a budget.
///
/// # Errors
/// A stack that cannot be built or trained.
pub fn print(config: &Config, text: &Text, stop: &dyn Fn() -> bool) -> Result<(), Failure> {
    let lr = Choice::AdamW.rate(config);
    let batch = text.loader(config, 1, 0)?.next().ok_or("the text has no batch")??.batch;
    println!("{:<54} {:>9} {:>9} {:>9} {:>9}", "one step of", "peak MB", "of plain", "ms", "of plain");
    let plain = plain(config, &batch, lr)?;
    row("the plain tch loop", &plain, &plain);
    for plan in plans(lr) {
        if stop() {
            return Ok(());
        }
        let mut training = plan.start(config)?;
        let measured = measure(|| {
            let _ = training.step(&batch)?;
            Ok(())
        })?;
        row(&plan.name(), &measured, &plain);
    }
    println!();
    Ok(())
}

/// Stacks that grow.
fn plans(lr: f64) -> [Plan; 4] {
    let none = Plan::plain(lr);
    let bf16 = Plan { amp: Amp::Bf16, ..none.clone() };
    let recomputed = Plan { recompute: Recompute::Every(1), ..bf16.clone() };
    let split = Plan { split: Split::Into(4), ..recomputed.clone() };
    let on_disk = Plan { state: Some(std::env::temp_dir()), ..split.clone() };
    [bf16, recomputed, split, on_disk]
}

/// The loop without memfit.
fn plain(config: &Config, batch: &Rows, lr: f64) -> Result<Measured, Failure> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), config, Recompute::Never);
    let mut optimizer = nn::AdamW::default().build(&vs, lr)?;
    measure(|| {
        optimizer.backward_step(&model.loss(batch, true));
        Ok(())
    })
}

fn measure(mut step: impl FnMut() -> Result<(), Failure>) -> Result<Measured, Failure> {
    step()?;
    memory::reset_peak(Device::Cpu)?;
    let mut fastest = f64::INFINITY;
    for _ in 0..2 {
        let start = Instant::now();
        step()?;
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    Ok(Measured { peak: memory::stats(Device::Cpu)?.peak, milliseconds: fastest * 1e3 })
}

fn row(name: &str, measured: &Measured, plain: &Measured) {
    let megabytes = measured.peak as f64 / 1e6;
    let share = measured.peak as f64 / plain.peak as f64;
    let time = measured.milliseconds / plain.milliseconds;
    println!("{name:<54} {megabytes:>9.1} {share:>9.2} {:>9.0} {time:>9.2}", measured.milliseconds);
}
