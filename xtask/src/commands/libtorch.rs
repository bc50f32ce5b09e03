//! `cargo xtask libtorch`: a libtorch to build with, or the whole PyTorch.

use super::Command;
use crate::libtorch::{self, Libtorch, WANTED, pytorch};
use crate::problem::{Problem, Result};
use crate::repo::Repo;

pub const COMMAND: Command = Command {
    name: "libtorch",
    args: "[--pytorch]",
    summary: "provision a CPU libtorch in .libtorch; --pytorch: all of PyTorch in .venv",
    run,
};

fn run(repo: &Repo, args: &[String]) -> Result<()> {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        [] => provision(repo),
        ["--pytorch"] => install_pytorch(repo),
        _ => Err(Problem::Usage(format!("libtorch takes --pytorch only, not `{}`", args.join(" ")))),
    }
}

fn provision(repo: &Repo) -> Result<()> {
    match libtorch::ready(repo)? {
        Libtorch::PyTorch => println!("LIBTORCH_USE_PYTORCH selects PyTorch {WANTED}: all set"),
        Libtorch::Named(path) => println!("LIBTORCH names {}: all set", path.display()),
        Libtorch::Provisioned(path) => println!("libtorch {WANTED} in {}", path.display()),
    }
    Ok(())
}

fn install_pytorch(repo: &Repo) -> Result<()> {
    pytorch::ready(repo)?;
    let venv = repo.venv();
    println!("PyTorch {WANTED} is in {}; to build with it:", venv.display());
    println!("  source {}/bin/activate", venv.display());
    println!("  export LIBTORCH_USE_PYTORCH=1");
    Ok(())
}
