//! memfit's side of `cargo xtask peers`: trains step by step on command.
//!
//! - `prepare FOLDER MODEL` writes what both sides start from and prints the model's size as
//!   the flags of `peer.py`.
//! - `serve FOLDER MODEL STRATEGY` reads lines: `step` trains on the next batch and gives
//!   `<seconds> <peak bytes> <loss>`; anything else ends it.
//! - `update OPTIMIZER SHAPES` answers `step` with `<seconds> <bytes of state> 0`.
//! - `losses OPTIMIZER SEEDS STEPS [RATE]` prints the rate and each seed's validation loss.
//! - Without arguments, as `cargo bench` and `cargo test --benches` run it, every strategy
//!   trains two steps of the small model.

#[path = "../../examples/gpt/mod.rs"]
mod gpt;
mod start;
mod strategy;
mod update;

use std::io::{BufRead, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use memfit::tch::{self, Device};
use memfit::{StepOutcome, memory};

use gpt::{Choice, Config, Failure, Training};
use start::Start;
use update::Updates;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ran = match words.as_slice() {
        ["prepare", folder, model] => prepare(Path::new(folder), model),
        ["serve", folder, model, strategy] => serve(Path::new(folder), model, strategy),
        ["update", optimizer, shapes] => updates(optimizer, shapes),
        ["losses", optimizer, seeds, steps] => losses(optimizer, seeds, steps, None),
        ["losses", optimizer, seeds, steps, rate] => losses(optimizer, seeds, steps, Some(rate)),
        _ => try_all(),
    };
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("peers: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn prepare(folder: &Path, model: &str) -> Result<(), Failure> {
    let config = config(model)?;
    start::write(folder, &config)?;
    let Config { blocks, heads, width, context, batch, dropout } = config;
    println!(
        "--blocks {blocks} --heads {heads} --width {width} --context {context} --batch {batch} --dropout {dropout}"
    );
    Ok(())
}

fn serve(folder: &Path, model: &str, strategy: &str) -> Result<(), Failure> {
    let config = config(model)?;
    let mut training = strategy::plan(strategy, folder)?.start(&config)?;
    training.vs.load(folder.join(start::WEIGHTS))?;
    let mut start = Start::read(folder)?;
    tch::manual_seed(0);
    answer(|| step(&mut training, &start.batch(&config)?))
}

fn updates(optimizer: &str, shapes: &str) -> Result<(), Failure> {
    let mut updates = Updates::start(optimizer, shapes)?;
    answer(|| updates.step().map(|(seconds, bytes)| (seconds, bytes, 0.0)))
}

fn losses(optimizer: &str, seeds: &str, steps: &str, rate: Option<&str>) -> Result<(), Failure> {
    update::losses(optimizer, seeds.parse()?, steps.parse()?, rate.map(str::parse).transpose()?)
}

/// Says that it is ready and answers each `step` with one line.
fn answer(mut step: impl FnMut() -> Result<(f64, u64, f64), Failure>) -> Result<(), Failure> {
    let mut output = std::io::stdout();
    writeln!(output, "ready memfit {}", tch::get_num_threads())?;
    for line in std::io::stdin().lock().lines() {
        if line?.trim() != "step" {
            break;
        }
        let (seconds, bytes, loss) = step()?;
        writeln!(output, "{seconds:.6} {bytes} {loss:.9}")?;
    }
    Ok(())
}

fn step(training: &mut Training, batch: &(tch::Tensor, tch::Tensor)) -> Result<(f64, u64, f64), Failure> {
    memory::reset_peak(Device::Cpu)?;
    let start = Instant::now();
    let outcome = training.step(batch)?;
    let seconds = start.elapsed().as_secs_f64();
    let peak = memory::stats(Device::Cpu)?.peak;
    match outcome {
        StepOutcome::Stepped { loss, .. } => Ok((seconds, peak, loss.double_value(&[]))),
        other => Err(format!("not one update per batch: {other:?}").into()),
    }
}

fn try_all() -> Result<(), Failure> {
    let folder = std::env::temp_dir().join(format!("memfit-peers-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let tried = try_in(&folder).and_then(|()| try_optimizers());
    std::fs::remove_dir_all(&folder)?;
    tried
}

fn try_in(folder: &Path) -> Result<(), Failure> {
    let config = Config::small();
    start::write(folder, &config)?;
    for name in strategy::EXAMPLES {
        let mut training = strategy::plan(name, folder)?.start(&config)?;
        training.vs.load(folder.join(start::WEIGHTS))?;
        let mut start = Start::read(folder)?;
        tch::manual_seed(0);
        step(&mut training, &start.batch(&config)?)?;
        let (seconds, peak, loss) = step(&mut training, &start.batch(&config)?)?;
        println!("{name}: {:.1} ms, peak {:.2} MB, loss {loss:.4}", seconds * 1e3, peak as f64 / 1e6);
    }
    Ok(())
}

/// Every optimizer makes an update, and teaches for two steps.
fn try_optimizers() -> Result<(), Failure> {
    for choice in Choice::ALL {
        let (seconds, bytes) = Updates::start(choice.name(), "96x64,96")?.step()?;
        println!("{}: {bytes} B of state, {:.1} ms", choice.name(), seconds * 1e3);
        update::losses(choice.name(), 1, 2, None)?;
    }
    Ok(())
}

fn config(model: &str) -> Result<Config, Failure> {
    match model {
        "reference" => Ok(Config::reference()),
        "small" => Ok(Config::small()),
        _ => Err(format!("there is no model {model}: reference and small").into()),
    }
}
