//! A run of `char_gpt` that was stopped and resumed prints the losses of one that was not, to the
//! last digit.

use std::fs;

use super::Context;
use crate::problem::{Problem, Result};
use crate::scratch::Scratch;

const RUN: [&str; 8] = ["--small", "--no-table", "--steps", "7", "--seed", "1", "--losses", "--amp=fp16"];
/// Sums of floats are the same for the same number of threads only.
const THREADS: &str = "2";
const TEXT: &str = include_str!("resumed.rs");
/// Stopped in the middle, then at the end of a snapshot's interval.
const PAUSES: [&str; 2] = ["3", "2"];

pub fn run(context: &Context) -> Result<()> {
    println!("-- example char_gpt, stopped and resumed");
    let scratch = Scratch::try_new("resumed")?;
    // The repository's text, which it would train on, may be written to meanwhile.
    let text = scratch.path().join("text");
    fs::write(&text, TEXT.repeat(40)).map_err(|error| Problem::io("write", &text, &error))?;
    let (text, folder) = (text.display().to_string(), scratch.path().join("run").display().to_string());
    let plain = ["--text", &text];
    let keep = [&plain[..], &["--snapshot", &folder, "--snapshot-every", "5", "--resume"]].concat();
    let straight = losses(context, &plain)?;
    let mut resumed = Vec::new();
    for pause in PAUSES {
        resumed.extend(losses(context, &[&keep[..], &["--pause-after", pause]].concat())?);
    }
    resumed.extend(losses(context, &keep)?);
    if straight.is_empty() || resumed != straight {
        return Err(Problem::new(format!(
            "char_gpt resumed printed other losses than straight through:\n{}\nand not\n{}",
            resumed.join("\n"),
            straight.join("\n")
        )));
    }
    Ok(())
}

/// The lines that tell a loss.
fn losses(context: &Context, more: &[&str]) -> Result<Vec<String>> {
    let cargo = context.cargo_with_features(&["run", "--quiet", "--example", "char_gpt", "--"]);
    let printed = cargo.env("OMP_NUM_THREADS", THREADS).args(RUN).args(more).output()?;
    Ok(printed.lines().filter(|line| line.starts_with("loss of step")).map(str::to_owned).collect())
}
