//! Train, save, stop at any moment, and go on to the bit.
//!
//! Two calls stand for two processes: all that passes between them lies in the folder.

mod gpt;

use std::path::Path;

use memfit::snapshot::Extras;
use memfit::tch::{self, Device};
use memfit::{Snapshots, State, StepOutcome, Value};

use gpt::{Config, Failure, Plan, Random, Text};

/// One process makes so many steps of the whole.
const HERE: u64 = 10;
const STEPS: u64 = 20;

fn main() -> Result<(), Failure> {
    let folder = std::env::temp_dir().join(format!("memfit-example-snapshot-{}", std::process::id()));
    process(&folder)?;
    println!("-- killed, and started again --");
    process(&folder)?;
    Ok(std::fs::remove_dir_all(&folder)?)
}

fn process(folder: &Path) -> Result<(), Failure> {
    tch::manual_seed(0);
    let config = Config::small();
    let text = Text::of_this_project(config.context)?;
    let mut training = Plan::plain(2e-3).start_run(&config, 64 << 20, STEPS)?;
    let mut random = Random::new(0);

    let mut snapshots = Snapshots::in_folder(folder)?.keep_last(2);
    // Parameters, moments, schedule, generators: all of it comes back, or an error and none.
    if let Some(snapshot) = snapshots.latest()? {
        let resumed = snapshot.resume(&mut training.stack)?;
        // What the stack does not know travels as an entry: here, what picks the rows.
        if let Some(Value::Int(state)) = resumed.entries.get("rows").and_then(|rows| rows.get("state")) {
            random = Random::new(*state as u64);
        }
        println!("going on after step {}", resumed.position.steps);
    }

    for _ in 0..HERE {
        let outcome = training.step(&text.batch(&config, &mut random, Device::Cpu))?;
        let StepOutcome::Stepped { loss, .. } = outcome else { continue };
        let step = training.stack.position().steps;
        println!("step {step}: loss {:.4}", loss.double_value(&[]));
        if step % 5 == 0 {
            let mut rows = State::default();
            rows.insert("state", Value::Int(random.state() as i64));
            let saved = snapshots.save(&mut training.stack, &Extras::new().entry("rows", rows))?;
            println!("saved {} bytes in {:.2} s", saved.bytes, saved.seconds);
        }
    }
    Ok(())
}
