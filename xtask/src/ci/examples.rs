//! Runs every example, with arguments that keep it small.

use std::path::Path;

use super::{Context, fitted, resumed};
use crate::problem::Result;

/// An example that is not here runs without arguments.
const SMALL: &[(&str, &[&str])] =
    &[("char_gpt", &["--steps", "3", "--small"]), ("digits", &["--epochs", "1"])];

/// An example that is here needs a file, which a command fetches.
const FETCHED: &[(&str, &str, &str)] = &[("digits", ".data/digits.csv.gz", "cargo xtask digits")];

pub fn run(context: &Context) -> Result<()> {
    let names = context.targets("examples");
    if names.is_empty() {
        println!("there are no examples");
        return Ok(());
    }
    context.cargo_with_features(&["build", "--examples"]).run()?;
    for name in &names {
        println!("-- example {name}");
        if let Some((file, fetch)) = missing(name, context.repo.root()) {
            println!("left out: there is no {file}; `{fetch}` fetches it");
            continue;
        }
        let cargo = context.cargo_with_features(&["run", "--quiet", "--example", name]);
        cargo.arg("--").args(small(name)).run()?;
    }
    resumed::run(context)?;
    fitted::run(context)
}

fn small(name: &str) -> &'static [&'static str] {
    SMALL.iter().find(|(known, _)| *known == name).map_or(&[], |(_, args)| args)
}

/// The file that an example needs and has not, and the command that fetches it.
fn missing(name: &str, root: &Path) -> Option<(&'static str, &'static str)> {
    let (_, file, fetch) = FETCHED.iter().find(|(known, ..)| *known == name)?;
    (!root.join(file).is_file()).then_some((*file, *fetch))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unlisted_example_runs_without_arguments() {
        assert_eq!(small("char_gpt"), ["--steps", "3", "--small"]);
        assert!(small("another").is_empty());
    }

    #[test]
    fn an_example_without_its_data_is_left_out() {
        let nowhere = Path::new("no-folder-here");
        assert_eq!(missing("digits", nowhere), Some((".data/digits.csv.gz", "cargo xtask digits")));
        assert_eq!(missing("char_gpt", nowhere), None);
    }
}
