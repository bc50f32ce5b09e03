//! memfit and PyTorch train the same model, from the same weights, on the same rows, with
//! equal dropout masks; peak bytes are counted by the same allocator in both.
//!
//! Each strategy has one long-lived process per side. Steps alternate, one side idle while the
//! other runs, so that a machine that slows down slows both.

mod data;
mod measure;
mod optimizers;
mod page;
mod report;
mod resident;
mod setup;
mod side;
mod snapshots;
mod strategies;
mod watching;

use std::fs;
use std::path::{Path, PathBuf};

use crate::problem::{Problem, Result};
use crate::repo::Repo;
use measure::Row;
use page::Page;
pub use page::Section;
use setup::Setup;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Interleaved pairs of measurements; the ratio is their median.
    pub pairs: usize,
    /// Steps of one measurement, where not the model's own number.
    pub steps: Option<usize>,
    /// Only this model.
    pub model: Option<String>,
    /// Only this strategy, or this optimizer, or this data.
    pub strategy: Option<String>,
    /// Only these sections; none stands for all.
    pub only: Vec<Section>,
    /// A Python that has PyTorch, instead of `.venv`.
    pub python: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self { pairs: 7, steps: None, model: None, strategy: None, only: Vec::new(), python: None }
    }
}

impl Options {
    /// Whether whole sections are measured, so that the page can take them.
    fn is_whole(&self) -> bool {
        self.model.is_none() && self.strategy.is_none() && self.steps.is_none()
    }

    fn sections(&self) -> Vec<Section> {
        match (&self.only[..], self.is_whole()) {
            ([], true) => Section::ALL.to_vec(),
            ([], false) => vec![Section::Models],
            (only, _) => only.to_vec(),
        }
    }
}

/// A model, and how many steps make one measurement.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    name: &'static str,
    steps: usize,
}

const MODELS: [Model; 2] = [Model { name: "reference", steps: 1 }, Model { name: "small", steps: 40 }];

/// Measures; whole sections go to `docs/benchmarks.md`, parts of them to standard output.
pub fn run(repo: &Repo, python: &Path, options: &Options) -> Result<()> {
    let setup = Setup::make(repo, python)?;
    let path = repo.root().join("docs/benchmarks.md");
    for section in options.sections() {
        let text = match section {
            Section::Models => models(&setup, options)?,
            Section::Optimizers => optimizers::section(&setup, options)?,
            Section::Snapshots => snapshots::section(&setup)?,
            Section::Watching => watching::section(&setup)?,
            Section::Data => data::section(&setup, options)?,
        };
        let text = format!("{}\n{text}", report::machine(&setup));
        if !options.is_whole() {
            println!("{text}");
            continue;
        }
        // One after the other, so that a section that fails loses none before it.
        let mut page = Page::read(&path)?;
        page.put(section, &text);
        page.write(&path, report::head(), &notes(repo))?;
        println!("{}: the section {} is written", path.display(), section.name());
    }
    Ok(())
}

/// Refuses a name that a chosen section has not: it would measure nothing, and nothing would be missed.
pub fn check(options: &Options) -> Result<()> {
    let models = MODELS.map(|model| model.name);
    known("model", options.model.as_deref(), "", &models)?;
    for section in options.sections() {
        let names = match section {
            Section::Models => {
                let of =
                    models.iter().filter(|name| options.model.as_deref().is_none_or(|only| only == **name));
                of.flat_map(|model| strategies::of(model)).map(|strategy| strategy.name).collect()
            }
            Section::Optimizers => optimizers::names(),
            Section::Data => data::names(),
            // They have one of each.
            Section::Snapshots | Section::Watching => continue,
        };
        known("strategy", options.strategy.as_deref(), section.name(), &names)?;
    }
    Ok(())
}

fn known(what: &str, name: Option<&str>, section: &str, names: &[&str]) -> Result<()> {
    match name {
        Some(name) if !names.contains(&name) => {
            let mut names = names.to_vec();
            names.sort_unstable();
            names.dedup();
            let of = if section.is_empty() { String::new() } else { format!(" in the section {section}") };
            let names = names.join(", ");
            Err(Problem::Usage(format!("there is no --{what} `{name}`{of}; there are {names}")))
        }
        _ => Ok(()),
    }
}

fn models(setup: &Setup, options: &Options) -> Result<String> {
    let wanted = |model: &&Model| options.model.as_deref().is_none_or(|name| name == model.name);
    let mut text = String::new();
    for model in MODELS.iter().filter(wanted) {
        let model = Model { steps: options.steps.unwrap_or(model.steps), ..*model };
        let rows = rows(setup, &model, options)?;
        text += &report::model(&model, &rows, options.pairs);
    }
    Ok(text)
}

fn rows(setup: &Setup, model: &Model, options: &Options) -> Result<Vec<Row>> {
    let work = setup.prepare(model)?;
    let mut anchor = work.pytorch("plain")?;
    let mut rows = Vec::new();
    for strategy in strategies::of(model.name) {
        if options.strategy.as_deref().is_some_and(|name| name != strategy.name) {
            continue;
        }
        let row = measure::row(&work, &mut anchor, strategy, model, options.pairs)?;
        eprintln!("{}: {}", model.name, report::line(&row));
        rows.push(row);
    }
    Ok(rows)
}

/// What a person has to say about the numbers.
fn notes(repo: &Repo) -> String {
    fs::read_to_string(repo.root().join("benches/peers/notes.md")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(model: Option<&str>, strategy: Option<&str>, only: &[Section]) -> Result<()> {
        let owned = |name: Option<&str>| name.map(str::to_owned);
        check(&Options {
            model: owned(model),
            strategy: owned(strategy),
            only: only.to_vec(),
            ..Options::default()
        })
    }

    #[test]
    fn a_name_that_is_not_there_is_a_matter_of_usage() {
        use Section::{Data, Models, Optimizers, Snapshots};
        for (model, strategy, only, words) in [
            (None, Some("image"), &[Data][..], "there are images, tokens"),
            (None, Some("images"), &[Data, Optimizers], "in the section optimizers"),
            (None, Some("adamw9"), &[Optimizers], "adamw8bit"),
            (None, Some("plane"), &[], "plain"),
            (Some("smal"), None, &[], "there are reference, small"),
            // Its batch cannot be split so.
            (Some("small"), Some("accumulate:16"), &[Models], "accumulate:4"),
        ] {
            match checked(model, strategy, only) {
                Err(Problem::Usage(said)) => assert!(said.contains(words), "{said}"),
                other => panic!("{model:?} {strategy:?}: {other:?}"),
            }
        }
        checked(None, Some("images"), &[Data, Snapshots]).unwrap();
        checked(Some("reference"), Some("accumulate:16"), &[]).unwrap();
        checked(None, None, &[]).unwrap();
    }
}
