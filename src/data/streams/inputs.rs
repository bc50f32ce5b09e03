//! The files of an epoch in their order, or the one pipe or reader.

use std::fs::File;
use std::io::{self, Read};
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tch::Device;

use super::input::{Input, Reading};
use crate::data::identity::{join, of_files};
use crate::data::order::Order;
use crate::data::random::mix;
use crate::data::{Interrupt, Origin};
use crate::error::{Error, Result};
use crate::sys::pipe::{self, Wake};

/// Where bytes come from.
pub(super) struct Inputs {
    from: Supply,
    pub(super) shuffle: Option<u64>,
    pub(super) reading: Reading,
    order: Order,
    wake: Arc<Wake>,
}

/// What the records of a stream are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Format {
    Lines = 1,
    Rows,
}

/// Logarithms of the windows that zstd may be let have.
const WINDOWS: RangeInclusive<u32> = 10..=31;

type Opened = Box<dyn Read + Send>;
type Reopen = dyn FnMut() -> io::Result<Opened> + Send;

enum Supply {
    /// With the bytes each had when it was opened last.
    Paths(Vec<(Arc<Path>, Option<u64>)>),
    With(Box<Reopen>),
    Reader(Option<Opened>),
    Pipe(Option<OwnedFd>),
}

impl Inputs {
    fn new(from: Supply) -> Self {
        let reading = Reading { behind: None, window: 23 };
        Self { from, shuffle: None, reading, order: Order::sequential(0), wake: Arc::default() }
    }

    pub(super) fn of_files<P: Into<PathBuf>>(paths: impl IntoIterator<Item = P>) -> Self {
        Self::new(Supply::Paths(paths.into_iter().map(|path| (path.into().into(), None)).collect()))
    }

    pub(super) fn of_reader(read: impl Read + Send + 'static) -> Self {
        Self::new(Supply::Reader(Some(Box::new(read))))
    }

    pub(super) fn of_pipe(pipe: impl Into<OwnedFd>) -> Self {
        Self::new(Supply::Pipe(Some(pipe.into())))
    }

    pub(super) fn stdin() -> Result<Self> {
        use std::os::fd::AsFd;
        let io = |source| Error::Io { action: "opening", path: "the standard input".into(), source };
        Ok(Self::of_pipe(io::stdin().as_fd().try_clone_to_owned().map_err(io)?))
    }

    pub(super) fn with(open: impl FnMut() -> io::Result<Opened> + Send + 'static) -> Self {
        Self::new(Supply::With(Box::new(open)))
    }

    /// Files of an epoch.
    pub(super) fn count(&self) -> u64 {
        match &self.from {
            Supply::Paths(paths) => paths.len() as u64,
            _ => 1,
        }
    }

    /// Sets the order of an epoch.
    pub(super) fn begin(&mut self, epoch: u64) -> Result<()> {
        if !WINDOWS.contains(&self.reading.window) {
            let (least, most) = (WINDOWS.start(), WINDOWS.end());
            let problem = format!("2 to the {}; from {least} to {most}", self.reading.window);
            return Err(Error::config("zstd_window", problem));
        }
        if matches!(&self.from, Supply::Reader(None) | Supply::Pipe(None)) {
            return Err(Error::CallOrder {
                call: "Loader::next or Loader::seek",
                state: "after a stream was begun that can be read only once".to_owned(),
                remedy: "stop after its first epoch, or make the stream of paths or by `with`, which open anew",
            });
        }
        self.order = match self.shuffle {
            Some(seed) => Order::shuffled(self.count(), seed, epoch),
            None => Order::sequential(self.count()),
        };
        Ok(())
    }

    /// The file of this number in the epoch's order.
    pub(super) fn path(&self, number: u64) -> Option<Arc<Path>> {
        let Supply::Paths(paths) = &self.from else { return None };
        Some(paths.get(self.order.at(number)? as usize)?.0.clone())
    }

    /// Opens the file of this number.
    pub(super) fn open(&mut self, number: u64) -> Result<Input> {
        let path = self.path(number);
        let opened = match &mut self.from {
            Supply::Paths(paths) => {
                let at = self.order.at(number).and_then(|at| usize::try_from(at).ok());
                match at.and_then(|at| paths.get_mut(at)) {
                    Some((path, length)) => open(path, length, self.reading, &self.wake),
                    None => Err(io::ErrorKind::NotFound.into()),
                }
            }
            Supply::With(open) => open().map(|read| Input::of_reader(read, self.reading, &self.wake)),
            Supply::Reader(read) => {
                let read = read.take().ok_or_else(|| io::ErrorKind::NotFound.into());
                read.map(|read| Input::of_reader(read, self.reading, &self.wake))
            }
            Supply::Pipe(pipe) => {
                let pipe = pipe.take().ok_or_else(|| io::ErrorKind::NotFound.into());
                pipe.and_then(|pipe| Input::of_pipe(File::from(pipe), self.reading, &self.wake))
            }
        };
        opened.map_err(|source| Error::Io { action: "opening", path: named(path), source })
    }

    /// An error that nothing can follow, with where it happened.
    pub(super) fn failure(&self, number: u64, origin: Origin, error: io::Error) -> Error {
        let (kind, origin) = (error.kind(), Origin { file: None, ..origin });
        if kind == io::ErrorKind::OutOfMemory {
            return Error::OutOfMemory { requested: None, live: None, limit: None, device: Device::Cpu };
        }
        let inner = Error::Data { origin, problem: error.to_string(), source: None };
        let path = named(self.path(number));
        Error::Io { action: "reading", path, source: io::Error::new(kind, inner) }
    }

    pub(super) fn interrupt(&self) -> Interrupt {
        match &self.from {
            Supply::Paths(_) | Supply::Pipe(_) => {
                let wake = self.wake.clone();
                Interrupt::With(Arc::new(move || wake.wake()))
            }
            Supply::With(_) | Supply::Reader(_) => Interrupt::Impossible,
        }
    }

    /// A number of how the files are cut, of their names below the folder that holds them all, and of
    /// their order.
    pub(super) fn identity(&self, format: Format, settings: u64) -> u64 {
        let seed = self.shuffle.map_or(0, |seed| mix(seed.wrapping_add(3)) | 1);
        let cut = mix(seed ^ mix(settings << 8 | format as u64));
        let Supply::Paths(paths) = &self.from else { return cut };
        join(cut, of_files(paths.iter().map(|(path, _)| &**path)))
    }
}

fn named(path: Option<Arc<Path>>) -> PathBuf {
    path.map_or_else(|| "a reader or pipe".into(), |path| path.to_path_buf())
}

/// A regular file that is shorter than in an earlier epoch is refused.
fn open(path: &Path, length: &mut Option<u64>, reading: Reading, wake: &Arc<Wake>) -> io::Result<Input> {
    let file = pipe::open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !metadata.is_file() {
        return Input::of_pipe(file, reading, wake);
    }
    let now = metadata.len();
    if let Some(before) = length.filter(|before| *before > now) {
        let problem = format!("the file has {now} bytes, it had {before} bytes when it was opened before");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    *length = Some(now);
    Input::of_file(file, now, reading, wake)
}
