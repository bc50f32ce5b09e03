//! A run of `char_gpt` that was stopped and resumed prints the losses of one that was not, to the
//! last digit.

use super::Context;
use crate::problem::{Problem, Result};
use crate::scratch::Scratch;

const RUN: [&str; 8] = ["--small", "--no-table", "--steps", "7", "--seed", "1", "--losses", "--amp=fp16"];
/// Stopped in the middle, then at the end of a snapshot's interval.
const PAUSES: [&str; 2] = ["3", "2"];

pub fn run(context: &Context) -> Result<()> {
    println!("-- example char_gpt, stopped and resumed");
    let straight = losses(context, &[])?;
    let scratch = Scratch::try_new("resumed")?;
    let folder = scratch.path().join("run").display().to_string();
    let keep = ["--snapshot", &folder, "--snapshot-every", "5", "--resume"];
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
    let printed = cargo.args(RUN).args(more).output()?;
    Ok(printed.lines().filter(|line| line.starts_with("loss of step")).map(str::to_owned).collect())
}
