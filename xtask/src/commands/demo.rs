//! `cargo xtask demo`: a small GPT trains on text inside an enforced memory budget.

use super::{Command, passed_on};
use crate::invocation::Invocation;
use crate::libtorch;
use crate::problem::Result;
use crate::repo::Repo;

pub const COMMAND: Command = Command {
    name: "demo",
    args: "[args…]",
    summary: "train a small GPT on text inside an enforced memory budget",
    run,
};

fn run(repo: &Repo, args: &[String]) -> Result<()> {
    libtorch::ready(repo)?;
    Invocation::cargo(repo.root())
        .args(["run", "--release", "--example", "char_gpt", "--"])
        .args(passed_on(args))
        .become_it()
}
