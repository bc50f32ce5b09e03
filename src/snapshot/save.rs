use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Instant;

use super::extras::{self, Extras};
use super::folder::{self, Keep, Slot};
use super::layout::Description;
use super::manifest::Manifest;
use super::open::Snapshot;
use super::write::{self, Writer, failed};
use crate::error::{Error, Result};
use crate::stack::Stack;
use crate::state::{Sink, State, Value};
use crate::step::Position;

/// Saves into a folder, one folder per snapshot, and finds what was saved.
#[derive(Debug)]
pub struct Snapshots {
    folder: PathBuf,
    keep: Keep,
    background: Option<JoinHandle<Result<Saved>>>,
}

/// A snapshot that is on the disk.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// Its folder.
    pub path: PathBuf,
    /// Bytes of its files.
    pub bytes: u64,
    /// Wall-clock seconds that it took.
    pub seconds: f64,
}

/// What a snapshot is about, apart from the state.
#[derive(Clone, Debug)]
struct Subject {
    position: Position,
    loss: Option<f64>,
    aliases: Vec<(String, String)>,
    entries: Vec<String>,
}

impl Snapshots {
    /// Uses this folder, and makes it where it is not there.
    ///
    /// # Errors
    /// [`Error::Io`] where it cannot be made.
    pub fn in_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref().to_owned();
        folder::make(&folder)?;
        Ok(Self { folder, keep: Keep::default(), background: None })
    }

    /// Removes, after each save, all but the newest `count` (at least the one just saved).
    pub fn keep_last(mut self, count: usize) -> Self {
        self.keep.last = Some(count);
        self
    }

    /// Keeps, beside the newest, the one with the lowest loss; see [`Snapshots::save_scored`].
    pub fn keep_best(mut self) -> Self {
        self.keep.best = true;
        self
    }

    /// Writes everything, tensor by tensor, and returns once it is on the disk.
    ///
    /// # Errors
    /// The failure of an earlier [`Snapshots::save_in_background`]: nothing is saved then, call
    /// again. [`Error::Io`]; those of [`Stack::state`]. The training and the snapshots that
    /// were there are intact.
    pub fn save(&mut self, training: &mut Stack, extras: &Extras<'_>) -> Result<Saved> {
        self.save_now(training, extras, None)
    }

    /// As [`Snapshots::save`], with a loss to know the best by. One that is NaN is never best.
    ///
    /// # Errors
    /// As [`Snapshots::save`].
    pub fn save_scored(&mut self, training: &mut Stack, extras: &Extras<'_>, loss: f64) -> Result<Saved> {
        self.save_now(training, extras, Some(loss))
    }

    /// Copies everything to host memory, which costs the bytes of the state until the save has
    /// ended, and writes it on a thread of its own. An earlier one is waited for.
    ///
    /// A failure is returned by the next call, or by [`Snapshots::wait`]; where neither comes,
    /// it is logged as an error when this is dropped.
    ///
    /// # Errors
    /// As [`Snapshots::save`]; out of memory.
    pub fn save_in_background(
        &mut self,
        training: &mut Stack,
        extras: &Extras<'_>,
        loss: Option<f64>,
    ) -> Result<()> {
        self.wait()?;
        extras.check()?;
        let start = Instant::now();
        let subject = Subject::of(training, extras, loss);
        let mut scripts = None;
        if extras.scripts().next().is_some() {
            // A module is borrowed: its archive is written now.
            let slot = Slot::open(&self.folder)?;
            scripts = Some((write_scripts(&slot, extras)?, slot));
        }
        let mut state = Copies(State::default());
        training.collect_into("Snapshots::save_in_background", &mut state)?;
        extras.visit(&mut state)?;
        let (folder, keep, Copies(state)) = (self.folder.clone(), self.keep, state);
        let write = move || {
            let (scripts, slot) = match scripts {
                Some(prepared) => prepared,
                None => (Vec::new(), Slot::open(&folder)?),
            };
            let visit = |sink: &mut dyn Sink| {
                state.iter().try_for_each(|(name, value)| extras::hand_on(name, value, sink))
            };
            subject.write(slot, scripts, keep, start, visit)
        };
        let caught = move || {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(write))
                .unwrap_or_else(|payload| Err(Error::from_panic(payload, "a background save")))
        };
        let thread = std::thread::Builder::new().name("memfit-snapshot".to_owned()).spawn(caught);
        self.background =
            Some(thread.map_err(|source| failed("starting a thread for", &self.folder, source))?);
        Ok(())
    }

    /// Waits for a background save; `None` where there is none.
    ///
    /// # Errors
    /// Its failure.
    pub fn wait(&mut self) -> Result<Option<Saved>> {
        match self.background.take().map(JoinHandle::join) {
            None => Ok(None),
            Some(Ok(saved)) => saved.map(Some),
            Some(Err(payload)) => Err(Error::from_panic(payload, "a background save")),
        }
    }

    /// The snapshot that was saved last, opened.
    ///
    /// # Errors
    /// A damaged manifest in the folder: which one is the newest is then unknown. Open one
    /// with [`Snapshot::open`], or remove the damaged one. As [`Snapshot::open`].
    pub fn latest(&self) -> Result<Option<Snapshot>> {
        self.open_one(|listed| listed.last())
    }

    /// The one with the lowest loss, opened.
    ///
    /// # Errors
    /// As [`Snapshots::latest`].
    pub fn best(&self) -> Result<Option<Snapshot>> {
        self.open_one(folder::best)
    }

    /// The folders of all snapshots, oldest first, damaged ones left out.
    ///
    /// # Errors
    /// [`Error::Io`] where the folder cannot be read.
    pub fn paths(&self) -> Result<Vec<PathBuf>> {
        Ok(folder::list(&self.folder)?.0.into_iter().map(|listed| listed.path).collect())
    }

    /// Opens the one chosen; again, where another process removed it in between.
    fn open_one(
        &self,
        choose: impl Fn(&[folder::Listed]) -> Option<&folder::Listed>,
    ) -> Result<Option<Snapshot>> {
        loop {
            let listed = self.listed()?;
            let Some(chosen) = choose(&listed) else { return Ok(None) };
            match Snapshot::open(&chosen.path) {
                Err(_) if folder::is_gone(&chosen.path) => {}
                opened => return opened.map(Some),
            }
        }
    }

    fn listed(&self) -> Result<Vec<folder::Listed>> {
        let (listed, unreadable) = folder::list(&self.folder)?;
        unreadable.into_iter().next().map_or(Ok(listed), Err)
    }

    fn save_now(&mut self, training: &mut Stack, extras: &Extras<'_>, loss: Option<f64>) -> Result<Saved> {
        self.wait()?;
        extras.check()?;
        let start = Instant::now();
        let subject = Subject::of(training, extras, loss);
        let mut description = Description::default();
        training.describe_into("Snapshots::save", &mut description)?;
        let slot = Slot::open(&self.folder)?;
        let scripts = write_scripts(&slot, extras)?;
        extras.visit(&mut description)?;
        let visit = |sink: &mut dyn Sink| {
            training.collect_into("Snapshots::save", sink)?;
            extras.visit(sink)
        };
        subject.stream(slot, scripts, self.keep, start, description, visit)
    }
}

impl Drop for Snapshots {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::error!(%error, "a snapshot that was being saved in the background is lost");
        }
    }
}

type Scripts = Vec<(String, String)>;

impl Subject {
    fn of(training: &Stack, extras: &Extras<'_>, loss: Option<f64>) -> Self {
        Self {
            position: training.position(),
            loss,
            aliases: training.aliases().to_vec(),
            entries: extras.names(),
        }
    }

    /// Writes what `visit` hands on, which it does twice.
    fn write(
        self,
        slot: Slot,
        scripts: Scripts,
        keep: Keep,
        start: Instant,
        mut visit: impl FnMut(&mut dyn Sink) -> Result<()>,
    ) -> Result<Saved> {
        let mut description = Description::default();
        visit(&mut description)?;
        self.stream(slot, scripts, keep, start, description, visit)
    }

    /// Writes what was described and `visit` hands on.
    fn stream(
        self,
        slot: Slot,
        scripts: Scripts,
        keep: Keep,
        start: Instant,
        mut description: Description,
        visit: impl FnOnce(&mut dyn Sink) -> Result<()>,
    ) -> Result<Saved> {
        let mut manifest = Manifest::new(self.position, slot.sequence()?, self.loss);
        manifest.scalars.0 = std::mem::take(&mut description.scalars);
        manifest.aliases.0 = self.aliases.iter().cloned().collect();
        manifest.entries = self.entries;
        let mut writer = Writer::new(&slot.path, description.layout(&self.aliases)?)?;
        visit(&mut writer)?;
        writer.finish(&mut manifest)?;
        for (name, file) in scripts {
            manifest.files.0.insert(file.clone(), write::enter(&slot.path.join(&file))?);
            manifest.scripts.0.insert(name, file);
        }
        let bytes: u64 = manifest.files.0.values().map(|file| file.bytes).sum();
        let (path, text) = slot.publish(&manifest, keep)?;
        Ok(Saved { path, bytes: bytes + text, seconds: start.elapsed().as_secs_f64() })
    }
}

fn write_scripts(slot: &Slot, extras: &Extras<'_>) -> Result<Scripts> {
    let mut scripts = Vec::new();
    for (name, module) in extras.scripts() {
        let file = extras::script_file(name);
        module.save_to(&slot.path.join(&file))?;
        scripts.push((name.to_owned(), file));
    }
    Ok(scripts)
}

/// Copies on the host, strides kept.
struct Copies(State);

impl Sink for Copies {
    fn scalar(&mut self, name: &str, value: Value) -> Result<()> {
        self.0.scalar(name, value)
    }

    fn tensor(&mut self, name: &str, tensor: &tch::Tensor) -> Result<()> {
        if tensor.device() == tch::Device::Cpu {
            return self.0.tensor(name, tensor);
        }
        self.0.insert(name, Value::Tensor(tensor.f_detach()?.f_to_device(tch::Device::Cpu)?));
        Ok(())
    }
}
