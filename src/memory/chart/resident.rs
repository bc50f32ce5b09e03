use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use tch::Device;

use super::{panels, png, raster, svg};
use crate::error::{Error, Result};
use crate::memory::export;
use crate::memory::monitor::Reading;
use crate::memory::summary;
use crate::origin::Origin;

/// What a process keeps in memory, over time, as a picture: anonymous bytes, pages of files, and
/// what libtorch's CPU allocator counts as live; of one run, or of several side by side on one scale of
/// bytes and one of time.
///
/// Runs come from a [`Monitor`](crate::memory::Monitor): its readings, or the file of JSON lines that it
/// wrote, long after the process ended.
///
/// *Cost*: none while it runs beside the monitor's own. A picture shows, per point of its width, the
/// lowest and the highest figure.
///
/// *Limits*: shared memory is not drawn. Where the system told no resident memory, a run has only its
/// live bytes. More than four runs leave little room for each.
///
/// ```
/// use memfit::memory::{Monitor, ResidentChart};
/// use std::time::Duration;
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let (file, picture) = (folder.path().join("memory.jsonl"), folder.path().join("memory.svg"));
/// let monitor = Monitor::every(Duration::from_millis(50)).write_json_lines(&file).start()?;
/// // … an epoch
/// monitor.stop()?;
/// let chart = ResidentChart::new("Memory over an epoch").run_of_file("with the loader", &file)?;
/// chart.above_start().budget(64 << 20).save(&picture)?;
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a chart is a value until it is saved"]
pub struct ResidentChart {
    pub(super) title: String,
    pub(super) runs: Vec<Run>,
    pub(super) budget: Option<u64>,
    pub(super) above_start: bool,
}

/// A run by its name.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) name: String,
    pub(super) moments: Vec<Moment>,
}

/// Bytes at one moment; what was not told is `None`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Moment {
    /// Seconds since the run's first.
    pub(super) time: f64,
    pub(super) bytes: [Option<f64>; 3],
}

/// What is drawn, from the back to the front; the places of [`Moment::bytes`].
pub(super) const CURVES: [&str; 3] = ["pages of files", "anonymous", "live in libtorch"];

impl ResidentChart {
    /// An empty chart under a heading.
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), runs: Vec::new(), budget: None, above_start: false }
    }

    /// Adds a run: a monitor's readings in their order, from
    /// [`MonitorConfig::on_reading`](crate::memory::MonitorConfig::on_reading).
    pub fn run<'a>(self, name: impl Into<String>, readings: impl IntoIterator<Item = &'a Reading>) -> Self {
        let moments = readings.into_iter().map(Moment::of);
        self.with(name.into(), moments.collect())
    }

    /// Adds a run: the last one in a file that
    /// [`MonitorConfig::write_json_lines`](crate::memory::MonitorConfig::write_json_lines) wrote. Lines that
    /// cannot be read, such as one that was torn where a process ended, are left out.
    ///
    /// # Errors
    /// [`Error::Io`] for a file that cannot be read; [`Error::Data`], with the first line that is none of a
    /// monitor's, where no line is one.
    pub fn run_of_file(self, name: impl Into<String>, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let read = std::fs::read_to_string(path);
        let text = read.map_err(|source| Error::Io { action: "reading", path: path.to_owned(), source })?;
        let moments = last_run(&text, path)?;
        Ok(self.with(name.into(), moments))
    }

    fn with(mut self, name: String, moments: Vec<Moment>) -> Self {
        let start = moments.first().map_or(0.0, |first| first.time);
        let moments = moments.into_iter().map(|moment| Moment { time: moment.time - start, ..moment });
        self.runs.push(Run { name, moments: moments.collect() });
        self
    }

    /// Draws a dashed line at so many bytes.
    pub fn budget(self, bytes: u64) -> Self {
        Self { budget: Some(bytes), ..self }
    }

    /// Draws what is beyond each run's first moment: what a part of a program took, without the program
    /// and its libraries.
    pub fn above_start(self) -> Self {
        Self { above_start: true, ..self }
    }

    /// As an SVG image.
    pub fn svg(&self) -> String {
        svg::write(&panels::scene(self))
    }

    /// As a PNG image of 1280 × 560 points.
    ///
    /// # Errors
    /// None that a chart meets.
    pub fn png(&self) -> Result<Vec<u8>> {
        png::encode(&raster::draw(&panels::scene(self)))
    }

    /// Writes a file whose name ends in `.svg` or `.png`. A file of that name is replaced when the
    /// new one is whole.
    ///
    /// # Errors
    /// [`Error::Config`] for another ending, [`Error::Io`] where the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let bytes = match export::ending(path).as_deref() {
            Some("svg") => self.svg().into_bytes(),
            Some("png") => self.png()?,
            _ => {
                let problem = format!("`{}` does not end in .svg or .png", path.display());
                return Err(Error::config("ResidentChart::save", problem));
            }
        };
        export::replace(path, &bytes)
    }
}

impl Moment {
    fn of(reading: &Reading) -> Self {
        let cpu = reading.devices.iter().find(|device| device.device == Device::Cpu);
        let resident = reading.resident;
        let bytes =
            [resident.map(|own| own.file), resident.map(|own| own.anonymous), cpu.map(|device| device.live)];
        // To the microsecond, as in files.
        let time = reading.time.as_micros() as f64 / 1e6;
        Self { time, bytes: bytes.map(|bytes| bytes.map(|bytes| bytes as f64)) }
    }
}

/// What of a monitor's line is drawn.
#[derive(Deserialize)]
struct Line {
    seconds: f64,
    devices: Vec<Counted>,
    resident: Option<Own>,
}

#[derive(Deserialize)]
struct Counted {
    device: String,
    live: u64,
}

#[derive(Deserialize)]
struct Own {
    anonymous: u64,
    file: u64,
}

impl Line {
    fn moment(&self) -> Moment {
        let cpu = summary::name(Device::Cpu);
        let cpu = self.devices.iter().find(|device| device.device == cpu);
        let own = self.resident.as_ref();
        let bytes = [own.map(|own| own.file), own.map(|own| own.anonymous), cpu.map(|device| device.live)];
        Moment { time: self.seconds, bytes: bytes.map(|bytes| bytes.map(|bytes| bytes as f64)) }
    }
}

/// The moments from where time last began again: a run's first is at 0. Lines that cannot be read are passed
/// over where others can.
fn last_run(text: &str, path: &Path) -> Result<Vec<Moment>> {
    let (mut moments, mut offset) = (Vec::<Moment>::new(), 0);
    let mut wrong = (Origin { file: Some(Arc::from(path)), ..Origin::default() }, "it is empty".to_owned());
    for (number, line) in text.split_inclusive('\n').enumerate() {
        match serde_json::from_str::<Line>(line) {
            Ok(line) => {
                let moment = line.moment();
                if moments.last().is_some_and(|last| last.time >= moment.time) {
                    moments.clear();
                }
                moments.push(moment);
            }
            Err(error) if wrong.0.record.is_none() => {
                wrong.0 = Origin { record: Some(number as u64), offset: Some(offset), ..wrong.0 };
                wrong.1 = error.to_string();
            }
            Err(_) => {}
        }
        offset += line.len() as u64;
    }
    if moments.is_empty() {
        let (origin, problem) = wrong;
        return Err(Error::Data {
            origin,
            problem: format!("no line of a monitor: {problem}"),
            source: None,
        });
    }
    Ok(moments)
}

#[cfg(test)]
#[path = "resident_tests.rs"]
mod tests;
