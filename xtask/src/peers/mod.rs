//! memfit and PyTorch train the same model, from the same weights, on the same rows, with
//! equal dropout masks; peak bytes are counted by the same allocator in both.
//!
//! Each strategy has one long-lived process per side. Steps alternate, one side idle while the
//! other runs, so that a machine that slows down slows both.

mod measure;
mod report;
mod setup;
mod side;
mod strategies;

use std::fs;
use std::path::{Path, PathBuf};

use crate::problem::{Problem, Result};
use crate::repo::Repo;
use measure::Row;
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
    /// Only this strategy.
    pub strategy: Option<String>,
    /// A Python that has PyTorch, instead of `.venv`.
    pub python: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self { pairs: 7, steps: None, model: None, strategy: None, python: None }
    }
}

impl Options {
    fn is_whole(&self) -> bool {
        self.model.is_none() && self.strategy.is_none()
    }
}

/// A model, and how many steps make one measurement.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    name: &'static str,
    steps: usize,
}

const MODELS: [Model; 2] = [Model { name: "reference", steps: 1 }, Model { name: "small", steps: 40 }];

/// Measures; the whole of it goes to `docs/benchmarks.md`, a part to standard output.
pub fn run(repo: &Repo, python: &Path, options: &Options) -> Result<()> {
    let setup = Setup::make(repo, python)?;
    let mut text = report::head(&setup, options);
    let wanted = |model: &&Model| options.model.as_deref().is_none_or(|name| name == model.name);
    for model in MODELS.iter().filter(wanted) {
        let model = Model { steps: options.steps.unwrap_or(model.steps), ..*model };
        let rows = rows(&setup, &model, options)?;
        text += &report::model(&model, &rows);
    }
    if !options.is_whole() {
        println!("{text}");
        return Ok(());
    }
    text += &notes(repo);
    let path = repo.root().join("docs/benchmarks.md");
    fs::write(&path, text).map_err(|error| Problem::io("write", &path, &error))?;
    println!("{} is written", path.display());
    Ok(())
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
