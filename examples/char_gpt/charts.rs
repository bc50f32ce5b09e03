//! What the last step did with memory, as files to look at.

use std::fs;
use std::path::PathBuf;

use memfit::memory::{self, Timeline};
use memfit::strategies::MemoryTimeline;

use crate::gpt::{Failure, Training};

/// What each file is for, by its ending.
const FILES: [(&str, &str); 4] = [
    ("svg", "the chart"),
    ("png", "the chart as a picture"),
    ("html", "the page to hover over and zoom"),
    ("json", "the trace for https://ui.perfetto.dev"),
];

/// Writes charts into a folder.
pub struct Charts {
    folder: Option<PathBuf>,
}

impl Charts {
    /// Makes the folder now: what is wrong with it shows before hours have passed.
    ///
    /// # Errors
    /// A folder that cannot be made.
    pub fn new(folder: Option<PathBuf>) -> Result<Self, Failure> {
        if let Some(folder) = &folder {
            fs::create_dir_all(folder).map_err(|error| {
                format!(
                    "cannot make {} for charts: {error}; name another with --charts, or --no-charts",
                    folder.display()
                )
            })?;
        }
        Ok(Self { folder })
    }

    /// The last step, where it was watched. Asked for before anything else runs: validating makes
    /// more events than are kept.
    pub fn last_step(training: &Training) -> Option<memfit::Result<Timeline>> {
        training.stack.strategy::<MemoryTimeline>().map(MemoryTimeline::timeline)
    }

    /// Prints the summary, with roles and segments where they were watched, and writes the files.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn end(&self, last_step: Option<memfit::Result<Timeline>>) -> Result<(), Failure> {
        match last_step {
            Some(Ok(timeline)) => {
                println!("{}", timeline.summary());
                self.folder.iter().try_for_each(|folder| write(&timeline, &folder.join("step")))
            }
            Some(Err(error)) => {
                println!("{}\nno charts: {error}", memory::summary());
                Ok(())
            }
            None => {
                println!("{}", memory::summary());
                Ok(())
            }
        }
    }
}

fn write(timeline: &Timeline, path: &std::path::Path) -> Result<(), Failure> {
    for (ending, what) in FILES {
        let path = path.with_extension(ending);
        timeline.save(&path)?;
        println!("wrote {what}: {}", path.display());
    }
    Ok(())
}
