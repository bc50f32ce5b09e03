//! Runs every example, with arguments that keep it small.

use super::{Context, fitted, pictures, resumed};
use crate::problem::Result;
use crate::scratch::Scratch;

/// An example that is not here runs without arguments.
const SMALL: &[(&str, &[&str])] = &[("char_gpt", &["--steps", "3", "--small"])];

/// It writes files into a folder that it is given.
const OF_FOLDER: &str = "memory_timeline";

/// It needs data that a machine without a network has not.
const OF_DATA: &str = "digits";

pub fn run(context: &Context) -> Result<()> {
    let names = context.targets("examples");
    if names.is_empty() {
        println!("there are no examples");
        return Ok(());
    }
    context.cargo_with_features(&["build", "--examples"]).run()?;
    for name in &names {
        println!("-- example {name}");
        if name == OF_DATA {
            pictures::run(context)?;
            continue;
        }
        let scratch = Scratch::try_new("example")?;
        let cargo = context.cargo_with_features(&["run", "--quiet", "--example", name]);
        let cargo = cargo.arg("--").args(small(name));
        match name.as_str() {
            OF_FOLDER => cargo.arg(scratch.path()).run()?,
            _ => cargo.run()?,
        }
    }
    resumed::run(context)?;
    fitted::run(context)
}

fn small(name: &str) -> &'static [&'static str] {
    SMALL.iter().find(|(known, _)| *known == name).map_or(&[], |(_, args)| args)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unlisted_example_runs_without_arguments() {
        assert_eq!(small("char_gpt"), ["--steps", "3", "--small"]);
        assert!(small("another").is_empty());
    }
}
