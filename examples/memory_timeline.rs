//! Where the memory of a training step goes: estimates it, trains a small GPT with checkpointed
//! blocks for three steps, prints how far off the estimate was and who held the peak, and writes the
//! chart, the page to hover over, the trace for Perfetto and the table of events.
//!
//! `cargo run --release --example memory_timeline -- FOLDER`

mod gpt;

use std::path::PathBuf;

use gpt::{Config, Failure, Gpt, Recompute};
use memfit::memory::LeakScope;
use memfit::optim::{AdamW, AdamWConfig};
use memfit::strategies::MemoryTimeline;
use memfit::tch::{Device, Kind, Tensor, nn};
use memfit::{Loss, Stack};

fn main() -> Result<(), Failure> {
    let folder = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    std::fs::create_dir_all(&folder)?;
    let config = Config { context: 128, batch: 8, ..Config::small() };
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), &config, Recompute::Every(1));
    let mut training = Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default().lr(3e-4))?)
        .with(MemoryTimeline::new())
        .build()?;
    let draw = || {
        let rows = Tensor::randint(256, [config.batch, config.context + 1], (Kind::Int64, Device::Cpu));
        (rows.narrow(1, 0, config.context), rows.narrow(1, 1, config.context).contiguous())
    };
    let loss = |batch: &(Tensor, Tensor)| Ok(Loss::mean(model.loss(batch, true), batch.0.numel()));
    println!("{}", training.estimate(&draw(), config.batch, loss)?);

    let step = |training: &mut Stack| -> Result<(), Failure> {
        let batch = draw();
        let outcome = training.step_with(|| loss(&batch))?;
        if outcome.stepped() { Ok(()) } else { Err("the step was skipped".into()) }
    };
    step(&mut training)?;
    if let Some(error) = training.estimate_error() {
        println!("the first step: {error}\n");
    }
    let scope = LeakScope::new()?;
    (0..2).try_for_each(|_| step(&mut training))?;
    scope.check()?;

    let Some(watch) = training.strategy::<MemoryTimeline>() else { return Ok(()) };
    let timeline = watch.timeline()?;
    println!("{}", timeline.summary());
    for ending in ["svg", "png", "html", "json", "csv"] {
        let path = folder.join("step").with_extension(ending);
        timeline.save(&path)?;
        println!("wrote {}", path.display());
    }
    Ok(())
}
