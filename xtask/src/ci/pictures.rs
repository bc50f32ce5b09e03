//! `digits` trains on a few rows that are made here, is stopped, and goes on: nothing is fetched.

use std::fmt::Write;
use std::fs;

use super::Context;
use crate::problem::{Problem, Result};
use crate::scratch::Scratch;

/// Of them a fifth validates; three batches of an epoch remain.
const ROWS: usize = 60;
const BATCH: &str = "16";

pub fn run(context: &Context) -> Result<()> {
    let scratch = Scratch::try_new("pictures")?;
    let file = scratch.path().join("digits.csv");
    fs::write(&file, rows()).map_err(|error| Problem::io("write", &file, &error))?;
    let (file, folder) = (file.display().to_string(), scratch.path().join("snapshots").display().to_string());
    let trained = |more: &[&str]| {
        let cargo = context.cargo_with_features(&["run", "--quiet", "--example", "digits", "--"]);
        // A GPU adds in another order each time.
        let cargo = cargo.env("CUDA_VISIBLE_DEVICES", "").env("OMP_NUM_THREADS", "2");
        cargo.args(["--data", &file, "--batch", BATCH]).args(more).output()
    };
    let short = trained(&["--epochs", "1"])?;
    told(&short, &["48 pictures to train on, 12 to validate with", "\nepoch  0: loss "], &["epoch  1"])?;
    let straight = trained(&["--epochs", "2"])?;
    let last = epoch(&straight, 1);
    // Stopped at the end of the first epoch, it has the second as one that was never stopped.
    let keep = ["--epochs", "2", "--snapshot", &folder];
    let begun = trained(&[&keep[..], &["--pause-after", "3"]].concat())?;
    told(&begun, &["\nepoch  0: loss "], &["going on", "epoch  1"])?;
    let resumed = trained(&[&keep[..], &["--resume"]].concat())?;
    told(&resumed, &["going on after step 3, ", "\nepoch  1: loss ", last], &["epoch  0"])
}

/// Lines as scikit-learn has them, plain: 64 pixels of 0 to 16, and the digit.
fn rows() -> String {
    let mut text = String::new();
    for row in 0..ROWS {
        let digit = row % 10;
        for at in 0..64 {
            // A bar whose place tells the digit, so that there is something to learn.
            let pixel = if at / 6 == digit { 16 } else { (row * 7 + at * 5) % 4 };
            let _ = write!(text, "{pixel},");
        }
        let _ = writeln!(text, "{digit}");
    }
    text
}

/// What an epoch's line says, but for its seconds.
fn epoch(printed: &str, number: usize) -> &str {
    let line = printed.lines().find(|line| line.starts_with(&format!("epoch {number:>2}: ")));
    line.and_then(|line| line.rsplit_once(',')).map_or("no epoch's line", |(line, _)| line)
}

/// Refuses what does not say all of some words, or says one of others.
fn told(printed: &str, words: &[&str], others: &[&str]) -> Result<()> {
    let missing = words.iter().find(|word| !printed.contains(**word));
    match missing.or_else(|| others.iter().find(|word| printed.contains(**word))) {
        None => Ok(()),
        Some(word) => Err(Problem::new(format!(
            "digits has to say {words:?} and none of {others:?}; it is wrong at {word:?}:\n{printed}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_pixels_and_a_digit() {
        let text = rows();
        assert_eq!(text.lines().count(), ROWS);
        for (row, line) in text.lines().enumerate() {
            let numbers: Vec<usize> = line.split(',').map(|number| number.parse().unwrap()).collect();
            assert!(numbers.len() == 65 && numbers.iter().all(|number| *number <= 16), "{line}");
            assert_eq!(numbers[64], row % 10);
        }
    }

    #[test]
    fn what_is_not_told_and_what_must_not_be_are_problems() {
        let printed = "x\nepoch  1: loss 2.0, 8.00 % right, 0.2 s\n";
        assert_eq!(epoch(printed, 1), "epoch  1: loss 2.0, 8.00 % right");
        assert!(told(printed, &[epoch(printed, 2)], &[]).is_err(), "no line is none");
        assert!(told("a b", &["a", "b"], &["c"]).is_ok());
        assert!(told("a b", &["a", "c"], &[]).unwrap_err().to_string().contains("wrong at \"c\""));
        assert!(told("a b", &["a"], &["b"]).unwrap_err().to_string().contains("wrong at \"b\""));
    }
}
