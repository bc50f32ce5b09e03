//! `cargo xtask peers`: memfit against PyTorch, written to `docs/benchmarks.md`.

use std::path::PathBuf;

use super::Command;
use crate::libtorch::{self, pytorch};
use crate::peers::{self, Options, Section};
use crate::problem::{Problem, Result};
use crate::repo::Repo;

pub const COMMAND: Command = Command {
    name: "peers",
    args: "[--only SECTION] [--pairs N] [--steps N] [--model NAME] [--strategy NAME] [--python PATH]",
    summary: "measure memfit against PyTorch; whole sections go to docs/benchmarks.md",
    run,
};

fn run(repo: &Repo, args: &[String]) -> Result<()> {
    let options = options(args)?;
    peers::check(&options)?;
    libtorch::ready(repo)?;
    let python = match &options.python {
        Some(python) => python.clone(),
        None => pytorch::ready(repo)?,
    };
    peers::run(repo, &python, &options)
}

fn options(args: &[String]) -> Result<Options> {
    let mut options = Options::default();
    let mut words = args.iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| Problem::Usage(format!("{word} needs a value")));
        match word.as_str() {
            "--pairs" => options.pairs = count(value()?)?,
            "--steps" => options.steps = Some(count(value()?)?),
            "--model" => options.model = Some(value()?.clone()),
            "--strategy" => options.strategy = Some(value()?.clone()),
            "--only" => options.only.push(section(value()?)?),
            "--python" => options.python = Some(PathBuf::from(value()?)),
            _ => return Err(Problem::Usage(format!("peers does not know `{word}`"))),
        }
    }
    Ok(options)
}

fn section(name: &str) -> Result<Section> {
    Section::named(name).ok_or_else(|| {
        let all = Section::ALL.map(Section::name).join(", ");
        Problem::Usage(format!("there is no section `{name}`: {all}"))
    })
}

fn count(text: &str) -> Result<usize> {
    match text.parse() {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(Problem::Usage(format!("`{text}` is no number above 0"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_arguments_are_a_matter_of_usage() {
        for words in
            [&["--pairs"][..], &["--pairs", "0"], &["--pairs", "x"], &["--no-such"], &["x"], &["--only", "x"]]
        {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            assert!(matches!(options(&words), Err(Problem::Usage(_))), "{words:?}");
        }
    }
}
