//! The repository's own commands: `cargo xtask <command>`.

mod ci;
mod commands;
mod invocation;
mod libtorch;
mod lock;
mod manifest;
mod peers;
mod preflight;
mod problem;
mod progress;
mod repo;
mod scratch;
#[path = "../../build/version.rs"]
mod version;

use std::env;
use std::process::ExitCode;

use commands::COMMANDS;
use problem::{Problem, Result};
use repo::Repo;

fn main() -> ExitCode {
    let args: Vec<String> = env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned()).collect();
    match dispatch(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Problem::Usage(sentence)) => {
            eprintln!("xtask: {sentence}\n\n{}", usage());
            ExitCode::from(2)
        }
        Err(Problem::Failure(sentence)) => {
            eprintln!("xtask: {sentence}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(args: &[String]) -> Result<()> {
    let Some((name, rest)) = args.split_first() else {
        return help();
    };
    if matches!(name.as_str(), "help" | "--help" | "-h") {
        return help();
    }
    match COMMANDS.iter().find(|command| command.name == name) {
        Some(command) => (command.run)(&Repo::find(), rest),
        None => Err(Problem::Usage(format!("there is no command `{name}`"))),
    }
}

fn help() -> Result<()> {
    println!("{}", usage());
    Ok(())
}

fn usage() -> String {
    let mut text = "usage: cargo xtask <command>\n".to_owned();
    for command in COMMANDS {
        text += &format!("\n  {:24} {}", format!("{} {}", command.name, command.args), command.summary);
    }
    text + &format!("\n  {:24} this text", "help")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn every_command_is_in_the_usage_text() {
        for command in COMMANDS {
            assert!(usage().contains(command.name) && usage().contains(command.summary));
        }
    }

    #[test]
    fn unknown_commands_and_arguments_are_a_matter_of_usage() {
        for words in [&["no-such"][..], &["libtorch", "--no-such"], &["ci", "no-such-step"]] {
            assert!(matches!(dispatch(&args(words)), Err(Problem::Usage(_))), "{words:?}");
        }
        assert_eq!(dispatch(&args(&["--help"])), Ok(()));
        assert_eq!(dispatch(&[]), Ok(()));
    }
}
