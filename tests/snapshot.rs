//! Saved, and brought back to the bit.

mod support;
#[path = "support/training.rs"]
mod training;

use memfit::optim::{AdamW, AdamWConfig, Optimizer, TchOptimizer};
use memfit::snapshot::{Extras, Weights};
use memfit::strategies::GradAccumulator;
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module, nn::OptimizerConfig};
use memfit::{CpuOffload, Error, Loss, Snapshot, Snapshots, Stack, State, StateVisitor, Value};
use support::serial;
use training::{KITS, Kit, Run, WINDOW, batch, difference_of, half, same_bits};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn problems(error: Error) -> Vec<String> {
    match error {
        Error::State { problems } | Error::Snapshot { problems, .. } => problems,
        other => panic!("{other}"),
    }
}

/// Case 55.
#[test]
fn resumed_anywhere_in_a_window_equals_never_stopped() {
    let _guard = serial();
    for kit in KITS {
        for stop in [0, 1, 2, 3 * WINDOW as u64, 3 * WINDOW as u64 + 2] {
            let end = 8 * WINDOW as u64;
            let mut straight = Run::new(kit, 1);
            straight.train(0, end);
            let expected = straight.stack.state().unwrap();

            let dir = folder();
            let mut snapshots = Snapshots::in_folder(dir.path()).unwrap();
            let mut stopped = Run::new(kit, 1);
            stopped.train(0, stop);
            let saved = snapshots.save(&mut stopped.stack, &Extras::new()).unwrap();
            stopped.train(stop, stop + 4);
            drop(stopped);

            let mut resumed = Run::new(kit, 99);
            resumed.train(0, 5);
            let back = Snapshot::open(&saved.path).unwrap().resume(&mut resumed.stack).unwrap();
            assert_eq!(back.micro_batches(), stop, "{kit:?}");
            resumed.train(stop, end);
            let found = resumed.stack.state().unwrap();
            assert_eq!(difference_of(&found, &expected), None, "{kit:?} stopped at {stop}");
        }
    }
}
