//! `cargo xtask ci`: everything that a change has to pass.

use std::time::Instant;

use super::Command;
use crate::ci::{Context, STEPS, Step};
use crate::libtorch;
use crate::problem::{Problem, Result};
use crate::repo::Repo;

pub const COMMAND: Command =
    Command { name: "ci", args: "[steps…]", summary: "check everything, or only the named steps", run };

fn run(repo: &Repo, names: &[String]) -> Result<()> {
    let steps = selected(names)?;
    let context = Context::new(repo, libtorch::ready(repo)?)?;
    let start = Instant::now();
    for step in &steps {
        println!("== {}: {}", step.name, step.summary);
        let start = Instant::now();
        (step.run)(&context)
            .map_err(|problem| Problem::new(format!("step {} failed: {problem}", step.name)))?;
        println!("== {}: {:.0} s", step.name, start.elapsed().as_secs_f64());
    }
    println!("== all {} steps passed: {:.0} s", steps.len(), start.elapsed().as_secs_f64());
    Ok(())
}

fn selected(names: &[String]) -> Result<Vec<&'static Step>> {
    let known = |name: &String| STEPS.iter().any(|step| step.name == name);
    if let Some(unknown) = names.iter().find(|name| !known(name)) {
        let all: Vec<&str> = STEPS.iter().map(|step| step.name).collect();
        let all = all.join(", ");
        return Err(Problem::Usage(format!("ci has no step `{unknown}`; it has {all}")));
    }
    let wanted = |step: &&Step| names.is_empty() || names.iter().any(|name| name == step.name);
    Ok(STEPS.iter().filter(wanted).collect())
}
