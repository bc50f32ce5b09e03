//! `cargo xtask test`: every test, documentation included.

use super::Command;
use crate::invocation::Invocation;
use crate::libtorch;
use crate::problem::Result;
use crate::repo::Repo;

pub const COMMAND: Command = Command {
    name: "test",
    args: "[args…]",
    summary: "run all tests, those in the documentation included; takes cargo test's arguments",
    run,
};

fn run(repo: &Repo, args: &[String]) -> Result<()> {
    libtorch::ready(repo)?;
    Invocation::cargo(repo.root()).args(["test", "--workspace"]).args(args).run()
}
