//! Train, save, stop at any moment, and go on to the bit.
//!
//! Two calls stand for two processes: all that passes between them lies in the folder.

mod gpt;

use std::path::Path;

use memfit::snapshot::Extras;
use memfit::tch;
use memfit::{Snapshots, StepOutcome};

use gpt::{Config, Failure, Plan, Text};

/// One process makes so many steps of the whole.
const HERE: usize = 10;
const STEPS: u64 = 20;

fn main() -> Result<(), Failure> {
    let folder = tempfile::tempdir()?;
    process(folder.path())?;
    println!("-- killed, and started again --");
    process(folder.path())?;
    Ok(folder.close()?)
}

fn process(folder: &Path) -> Result<(), Failure> {
    tch::manual_seed(0);
    let config = Config::small();
    let text = Text::of_this_project(config.context)?;
    let mut training = Plan::plain(2e-3).start_run(&config, 64 << 20, STEPS)?;
    let mut loader = text.loader(&config, 0, 1)?;

    let mut snapshots = Snapshots::in_folder(folder)?.keep_last(2);
    // Parameters, moments, schedule, generators, how far the text is consumed: all of it comes back,
    // or an error and none.
    if let Some(snapshot) = snapshots.latest()? {
        let resumed = snapshot.resume(&mut training.stack)?;
        if let Some(position) = resumed.data {
            loader.seek(position)?;
        }
        println!("going on after step {}", resumed.position.steps);
    }

    for batch in loader.take(HERE) {
        let outcome = training.step_loaded(&batch?)?;
        let StepOutcome::Stepped { loss, .. } = outcome else { continue };
        let step = training.stack.position().steps;
        println!("step {step}: loss {:.4}", loss.double_value(&[]));
        if step % 5 == 0 {
            let saved = snapshots.save(&mut training.stack, &Extras::new())?;
            println!("saved {} bytes in {:.2} s", saved.bytes, saved.seconds);
        }
    }
    Ok(())
}
