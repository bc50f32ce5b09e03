//! Trains a byte-level GPT on real text inside an enforced memory budget.
//!
//! `cargo xtask demo` runs it; `cargo run --release --example char_gpt -- --help` tells its
//! flags. It first measures what a plain loop takes and what stacks of strategies take
//! instead, then trains within the budget and writes a little text.

#[path = "char_gpt/charts.rs"]
mod charts;
#[path = "char_gpt/flags.rs"]
mod flags;
mod gpt;
#[path = "char_gpt/keeper.rs"]
mod keeper;
#[path = "char_gpt/progress.rs"]
mod progress;
mod refusals;
#[path = "char_gpt/table.rs"]
mod table;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;
use memfit::memory::{self, Bytes};
use memfit::tch::{self, Device};

use charts::Charts;
use flags::Flags;
use gpt::{Failure, Text, Training};
use keeper::Keeper;
use progress::Progress;

fn main() -> ExitCode {
    match run(&Flags::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("char_gpt: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(flags: &Flags) -> Result<(), Failure> {
    let stopped = Arc::new(AtomicBool::new(false));
    let handler = stopped.clone();
    ctrlc::set_handler(move || handler.store(true, Ordering::Relaxed))?;
    let stop = move || stopped.load(Ordering::Relaxed);
    refusals::leave_to_errors();

    let config = flags.config();
    let text = match &flags.text {
        Some(file) => Text::of_file(file, config.context)?,
        None => Text::of_this_project(config.context)?,
    };
    // What is wrong with the text shows before anything begins.
    drop(text.loader(&config, 0, 0)?);
    tch::manual_seed(flags.seed() as i64);
    if !flags.no_table {
        table::print(&config, &text, &stop)?;
    }
    if stop() {
        println!("stopped before training began");
        return Ok(());
    }
    train(flags, &text, &stop)
}

fn train(flags: &Flags, text: &Text, stop: &dyn Fn() -> bool) -> Result<(), Failure> {
    let (config, plan) = (flags.config(), flags.plan());
    let charts = Charts::new(flags.charts())?;
    let mut training = plan.start_run(&config, flags.budget().get(), flags.steps())?;
    println!("training with {} within {}", plan.name(), flags.budget());
    println!("{}\n", training.stack);

    let mut keeper = Keeper::new(flags, text)?;
    let from = keeper.begin(flags, &mut training)?;
    let mut loader = text.loader(&config, keeper.seed(), flags.workers())?;
    if let Some(position) = training.stack.data_position() {
        loader.seek(position)?;
    }
    let mut progress = Progress::new(flags.steps(), from, flags.losses, flags.monitor.as_deref())?;
    let pause = flags.pause_after.map_or(flags.steps(), |steps| from.saturating_add(steps));
    while progress.done() < flags.steps().min(pause) && !stop() {
        // Where the loader gives nothing an epoch ended; its next batch is of the next one.
        let Some(batch) = loader.next() else { continue };
        let outcome = training.step_loaded(&batch?)?;
        progress.step(&outcome);
        keeper.step(progress.done(), &mut training)?;
    }
    progress.finish();
    let last_step = Charts::last_step(&training);
    keeper.end(progress.done(), flags.steps(), &mut training)?;
    summarise(flags, text, &mut training, &progress)?;
    charts.end(last_step)
}

fn summarise(
    flags: &Flags,
    text: &Text,
    training: &mut Training,
    progress: &Progress,
) -> Result<(), Failure> {
    let (steps, seconds) = progress.here();
    let validation = text.validation(&flags.config(), 16, Device::Cpu)?;
    let loss = training.validate(&validation)?;
    let entropy = text.entropy();
    let verdict = if loss < entropy { "below" } else { "not yet below" };
    let sample = training.stack.evaluate(|| Ok(training.model.write(b"\n", 240, Device::Cpu)))?;
    println!("\nsome text of its own:\n{}\n", printable(&sample));
    let (done, all) = (progress.done(), flags.steps());
    println!("{done} of {all} steps, {steps} here in {seconds:.0} s, {} skipped", progress.skipped);
    println!("validation loss {loss:.3} nats a byte, {verdict} {entropy:.3} of guessing by frequency");
    let stats = memory::stats(Device::Cpu)?;
    println!("peak {} within {}, live now {}\n", Bytes(progress.peak), flags.budget(), Bytes(stats.current));
    Ok(())
}

/// The text with what a terminal would obey, or could not show, replaced.
fn printable(bytes: &[u8]) -> String {
    let shown = |c: char| if c.is_control() && c != '\n' { '\u{fffd}' } else { c };
    String::from_utf8_lossy(bytes).chars().map(shown).collect()
}
