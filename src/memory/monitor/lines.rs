use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use super::reading::Reading;
use crate::error::{Error, Result};
use crate::memory::summary::name;

/// A file that gets one JSON object per reading.
#[derive(Debug)]
pub(super) struct Lines {
    path: PathBuf,
    file: File,
    /// Whether the file ends within a line, which the next one must not join.
    torn: bool,
}

impl Lines {
    /// Opens the file, or makes it; lines come behind those that are there.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let failed = |action| move |source| Error::Io { action, path: path.to_owned(), source };
        let file = OpenOptions::new().append(true).create(true).open(path).map_err(failed("opening"))?;
        let torn = torn(path, &file).map_err(failed("reading"))?;
        Ok(Self { path: path.to_owned(), file, torn })
    }

    /// Writes a reading's line as a whole, and hands it to the system at once.
    pub(super) fn write(&mut self, reading: &Reading) -> Result<()> {
        let failed = |source| Error::Io { action: "writing", path: self.path.clone(), source };
        let mut bytes = Vec::with_capacity(512);
        if self.torn {
            bytes.push(b'\n');
        }
        serde_json::to_writer(&mut bytes, &Line::of(reading)).map_err(|error| failed(error.into()))?;
        bytes.push(b'\n');
        let written = self.file.write_all(&bytes).map_err(failed);
        self.torn = written.is_err();
        written
    }
}

/// Whether a file has an unfinished last line.
fn torn(path: &Path, file: &File) -> io::Result<bool> {
    let about = file.metadata()?;
    if !about.is_file() || about.len() == 0 {
        return Ok(false);
    }
    let mut file = File::open(path)?;
    file.seek(SeekFrom::End(-1))?;
    let mut last = [0];
    file.read_exact(&mut last)?;
    Ok(last != [b'\n'])
}

/// One line. Times in seconds, everything else in bytes.
#[derive(Serialize)]
struct Line {
    seconds: f64,
    unix_seconds: f64,
    devices: Vec<Counted>,
    resident: Option<Own>,
    ram_total: Option<u64>,
    ram_available: Option<u64>,
    swap_used: Option<u64>,
    cgroup: Option<Group>,
    warnings: Vec<Full>,
}

#[derive(Serialize)]
struct Counted {
    device: String,
    live: u64,
    peak: u64,
    reserved: u64,
}

#[derive(Serialize)]
struct Own {
    anonymous: u64,
    file: u64,
    shared: u64,
}

#[derive(Serialize)]
struct Group {
    usage: u64,
    page_cache: u64,
    limit: Option<u64>,
}

#[derive(Serialize)]
struct Full {
    pool: &'static str,
    used: u64,
    total: u64,
}

impl Line {
    fn of(reading: &Reading) -> Self {
        let counted = reading.devices.iter().map(|device| Counted {
            device: name(device.device),
            live: device.live,
            peak: device.peak,
            reserved: device.reserved,
        });
        let full = reading.warnings.iter().map(|warning| Full {
            pool: warning.pool.name(),
            used: warning.used,
            total: warning.total,
        });
        Self {
            seconds: seconds(reading.time),
            unix_seconds: seconds(reading.unix),
            devices: counted.collect(),
            resident: reading.resident.map(|own| Own {
                anonymous: own.anonymous,
                file: own.file,
                shared: own.shared,
            }),
            ram_total: reading.ram_total,
            ram_available: reading.ram_available,
            swap_used: reading.swap_used,
            cgroup: reading.cgroup.map(|group| Group {
                usage: group.usage,
                page_cache: group.page_cache,
                limit: group.limit,
            }),
            warnings: full.collect(),
        }
    }
}

/// To the microsecond.
fn seconds(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e6
}
