//! Trains a small ResNet on 8×8 pictures of digits: a template for images.
//!
//! `cargo xtask digits` fetches the pictures, `cargo run --release --example digits` trains, and
//! `-- --help` tells the flags. Rows of a compressed CSV stream through the loader, shuffled; the
//! workers shift each picture and add noise; the last fifth validates.
//!
//! A batch that does not fit the budget runs in micro-batches. `BatchNorm` is the one layer here
//! that then computes something else: it normalises by the mean and variance of the rows that it
//! sees at once, so each micro-batch by its own, and its running statistics move once per
//! micro-batch. That is noise of the kind that a smaller batch has. It is harmless down to some 16
//! rows; below, prefer `GroupNorm`, which never looks at other rows. The gradients of all else are
//! those of the whole batch. In `evaluate` the running statistics count, and they do not move.

#[path = "digits/data.rs"]
mod data;
#[path = "digits/flags.rs"]
mod flags;
#[path = "digits/model.rs"]
mod model;
mod refusals;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use memfit::data::Loader;
use memfit::memory::Bytes;
use memfit::optim::{AdamW, AdamWConfig};
use memfit::snapshot::Extras;
use memfit::strategies::{AmpScaler, Budget, Cosine, MicroBatcher};
use memfit::tch::{self, Device, Kind, nn, nn::ModuleT};
use memfit::{Loss, Snapshots, Stack, StepOutcome};

use data::{Digits, Pictures};
use flags::{Amp, Flags};
use model::ResNet;

/// What functions fail with: one sentence for the user.
type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let flags = match Flags::read() {
        Ok(flags) => flags,
        Err(code) => return code,
    };
    match run(&flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // What a file holds is nothing for a terminal to obey.
            let obeyed = |c: char| c.is_control() && c != '\n';
            eprintln!("digits: {}", failure.to_string().replace(obeyed, "\u{fffd}"));
            ExitCode::FAILURE
        }
    }
}

fn run(flags: &Flags) -> Result<(), Failure> {
    let stopped = Arc::new(AtomicBool::new(false));
    let handler = stopped.clone();
    ctrlc::set_handler(move || handler.store(true, Ordering::Relaxed))?;
    refusals::leave_to_errors();

    let digits = Digits::of_file(&flags.data)?;
    println!(
        "{} pictures to train on, {} to validate with",
        digits.training_rows(),
        digits.validation_rows()
    );
    let device = Device::cuda_if_available();
    let mut loader = digits.training(flags.batch(), flags.seed(), flags.workers(), device)?;
    let mut validation = digits.validation(flags.workers(), device)?;

    tch::set_num_threads(flags.threads());
    tch::manual_seed(flags.seed() as i64);
    let vs = nn::VarStore::new(device);
    let model = ResNet::new(&vs.root());
    let steps = flags.epochs() * digits.training_rows().div_ceil(flags.batch() as u64);
    let mut training = stack(flags, &vs, steps)?;
    println!("{training}\n");

    let mut snapshots = begin(flags, &mut training, &mut loader)?;
    let (mut peak, mut left) = (0, flags.pause_after.unwrap_or(u64::MAX));
    while loader.epoch() < flags.epochs() && !stopped.load(Ordering::Relaxed) {
        let (epoch, start) = (loader.epoch(), Instant::now());
        let (mut sum, mut stepped) = (0.0, 0_u32);
        // Ends where the epoch ends; a resumed one begins in its middle.
        for batch in loader.by_ref() {
            let outcome = training.step_batch(&batch?, |batch| loss(&model, &batch.batch))?;
            if let StepOutcome::Stepped { loss, peak: highest, .. } = outcome {
                sum += loss.double_value(&[]);
                peak = peak.max(highest);
                stepped += 1;
            }
            left -= 1;
            // Behind the step: a batch that the loader gave is one that training had.
            if left == 0 || stopped.load(Ordering::Relaxed) {
                stopped.store(true, Ordering::Relaxed);
                break;
            }
        }
        if stepped > 0 {
            let right = 100.0 * accuracy(&mut training, &model, &mut validation)?;
            let (loss, seconds) = (sum / f64::from(stepped), start.elapsed().as_secs_f64());
            println!("epoch {epoch:>2}: loss {loss:.4}, {right:.2} % right, {seconds:.1} s");
        }
        if let Some(snapshots) = &mut snapshots {
            snapshots.save(&mut training, &Extras::new())?;
        }
    }
    println!("peak {} within {}", Bytes(peak), flags.budget());
    Ok(())
}

fn stack(flags: &Flags, vs: &nn::VarStore, steps: u64) -> memfit::Result<Stack> {
    let optimizer = AdamW::new(vs, AdamWConfig::default().lr(flags.lr()).weight_decay(0.05))?;
    let stack = Stack::of(vs, optimizer)
        .with(Cosine::new(steps).warm_up(steps / 10))
        .with(MicroBatcher::new())
        .with(Budget::bytes(flags.budget().get()));
    match flags.amp {
        Amp::Off => stack,
        Amp::Bf16 => stack.with(AmpScaler::bf16()),
        Amp::Fp16 => stack.with(AmpScaler::fp16()),
    }
    .build()
}

fn loss(model: &ResNet, (pictures, labels): &Pictures) -> memfit::Result<Loss> {
    let scores = model.forward_t(pictures, true).to_kind(Kind::Float);
    Ok(Loss::mean(scores.cross_entropy_for_logits(labels), labels.size()[0]))
}

/// The share of the validation pictures whose highest score is their label's.
fn accuracy(training: &mut Stack, model: &ResNet, validation: &mut Loader<Pictures>) -> memfit::Result<f64> {
    training.evaluate(|| {
        let (mut right, mut all) = (0, 0);
        for batch in validation.by_ref() {
            let (pictures, labels) = batch?.batch;
            let best = model.forward_t(&pictures, false).argmax(-1, false);
            right += best.eq_tensor(&labels).sum(Kind::Int64).int64_value(&[]);
            all += labels.size()[0];
        }
        Ok(right as f64 / all as f64)
    })
}

/// Goes on where the newest snapshot was taken, in the data too.
fn begin(
    flags: &Flags,
    training: &mut Stack,
    loader: &mut Loader<Pictures>,
) -> Result<Option<Snapshots>, Failure> {
    let Some(folder) = &flags.snapshot else { return Ok(None) };
    let snapshots = Snapshots::in_folder(folder)?.keep_last(2);
    let folder = folder.display();
    if !flags.resume {
        if !snapshots.paths()?.is_empty() {
            return Err(format!("{folder} has snapshots: go on with --resume, or name another").into());
        }
        return Ok(Some(snapshots));
    }
    match snapshots.latest()? {
        Some(snapshot) => {
            if let Some(position) = snapshot.resume(training)?.data {
                loader.seek(position)?;
            }
            println!("going on after step {}, from {}", training.position().steps, snapshot.path().display());
        }
        None => println!("there is no snapshot in {folder} yet: starting from the beginning"),
    }
    Ok(Some(snapshots))
}
