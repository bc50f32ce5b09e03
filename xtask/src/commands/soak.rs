//! `cargo xtask soak`: kills a real training process again and again, and compares its end with
//! that of a run that was never killed.

use super::Command;
use crate::invocation::Invocation;
use crate::libtorch;
use crate::problem::{Problem, Result};
use crate::repo::Repo;

const KILLS: u64 = 50;

pub const COMMAND: Command = Command {
    name: "soak",
    args: "[KILLS]",
    summary: "kill a training process at 50 (or KILLS) random moments and compare the bits",
    run,
};

fn run(repo: &Repo, args: &[String]) -> Result<()> {
    let kills = kills(args)?;
    libtorch::ready(repo)?;
    Invocation::cargo(repo.root())
        .args(["test", "--test", "snapshot_kill", "--", "--nocapture", "killed_at_random_moments"])
        .env("MEMFIT_KILLS", kills.to_string())
        .run()
}

fn kills(args: &[String]) -> Result<u64> {
    match args {
        [] => Ok(KILLS),
        [word] => word
            .parse()
            .ok()
            .filter(|kills| *kills > 0)
            .ok_or_else(|| Problem::Usage(format!("`{word}` is no number of kills above 0"))),
        _ => Err(Problem::Usage("soak takes the number of kills only".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_a_number() {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert_eq!(kills(&[]), Ok(50));
        assert_eq!(kills(&words(&["7"])), Ok(7));
        for wrong in [&["0"][..], &["x"], &["1", "2"]] {
            assert!(matches!(kills(&words(wrong)), Err(Problem::Usage(_))), "{wrong:?}");
        }
    }
}
