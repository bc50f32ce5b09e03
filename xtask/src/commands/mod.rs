//! One file per command. A new one needs its file, its `mod` line and its place in the list.

mod ci;
mod demo;
mod digits;
mod libtorch;
mod peers;
mod soak;
mod test;

use crate::problem::Result;
use crate::repo::Repo;

pub struct Command {
    pub name: &'static str,
    /// As the usage text shows them.
    pub args: &'static str,
    pub summary: &'static str,
    pub run: fn(&Repo, &[String]) -> Result<()>,
}

pub const COMMANDS: &[Command] = &[
    demo::COMMAND,
    test::COMMAND,
    soak::COMMAND,
    peers::COMMAND,
    digits::COMMAND,
    libtorch::COMMAND,
    ci::COMMAND,
];

/// A `--` that separates our arguments from the program's may be written or left out.
fn passed_on(args: &[String]) -> &[String] {
    match args.split_first() {
        Some((first, rest)) if first == "--" => rest,
        _ => args,
    }
}
