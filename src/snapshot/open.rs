use std::collections::BTreeMap;
use std::io::{Seek, SeekFrom};
use std::path::{Path, PathBuf};

use tch::{CModule, TrainableCModule, nn};

use super::extras::ENTRIES;
use super::layout::MODEL;
use super::read::Files;
use super::weights::Weights;
use super::write::failed;
use crate::error::Result;
use crate::stack::Stack;
use crate::state::State;
use crate::step::{DataPosition, Position};

/// One snapshot on disk, opened: its manifest read, its files there and of the right length,
/// their headers as the manifest says. Checksums are compared before anything is loaded.
#[derive(Debug)]
pub struct Snapshot {
    path: PathBuf,
    files: Files,
}

/// What [`Snapshot::resume`] brought back beside the stack.
#[non_exhaustive]
#[derive(Debug)]
pub struct Resumed {
    /// How far training had come.
    pub position: Position,
    /// Micro-batches done in the window that is open now; 0 where none is.
    pub open_micro_batches: u64,
    /// How far training had consumed its data, for [`Loader::seek`](crate::data::Loader::seek);
    /// `None` where no batch knew.
    pub data: Option<DataPosition>,
    /// The entries of [`Extras`](super::Extras), by name.
    pub entries: BTreeMap<String, State>,
}

impl Resumed {
    /// Micro-batches consumed so far, those of the open window included: how many data that
    /// cannot seek has to skip. Those that failed are not counted: [`data`](Self::data), where batches know
    /// their position, is exact then too, and skips without reading.
    pub fn micro_batches(&self) -> u64 {
        self.position.micro_batches + self.open_micro_batches
    }
}

impl Snapshot {
    /// Opens a snapshot's folder.
    ///
    /// # Errors
    /// [`Error::Snapshot`](crate::Error::Snapshot) lists everything that is damaged;
    /// [`Error::Io`](crate::Error::Io) where the system cannot read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        Ok(Self { files: Files::open(&path)?, path })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How far training had come.
    pub fn position(&self) -> Position {
        self.files.manifest.position.into()
    }

    /// What it was scored with.
    pub fn loss(&self) -> Option<f64> {
        self.files.manifest.loss()
    }

    /// Reads all files through and compares their checksums.
    ///
    /// # Errors
    /// As [`Snapshot::open`].
    pub fn verify(&self) -> Result<()> {
        self.files.verify()
    }

    /// Brings the whole training state back, to the bit: the stack has to have the same
    /// optimizer, strategies, groups and names. An open window goes on where it was.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State) lists everything that does not fit,
    /// [`Error::Snapshot`](crate::Error::Snapshot) everything that is damaged; nothing was
    /// changed then. [`Error::Poisoned`](crate::Error::Poisoned) where the files changed, or
    /// could not be read any more, after all that.
    pub fn resume(&self, training: &mut Stack) -> Result<Resumed> {
        let mut entries = BTreeMap::new();
        training.load_from("Snapshot::resume", &self.files, || {
            self.files.verify()?;
            entries = self.read_entries()?;
            Ok(())
        })?;
        Ok(Resumed {
            position: training.position(),
            open_micro_batches: training.open_micro_batches(),
            data: training.data_position(),
            entries,
        })
    }

    /// The model's tensors alone, for inference or for fine-tuning.
    ///
    /// # Errors
    /// As [`Snapshot::open`]; the model's file is verified.
    pub fn weights(&self) -> Result<Weights> {
        Ok(Weights::of(self.files.file(MODEL)?))
    }

    /// The entries of [`Extras`](super::Extras), by name, on the host.
    ///
    /// # Errors
    /// As [`Snapshot::open`].
    pub fn entries(&self) -> Result<BTreeMap<String, State>> {
        self.files.verify()?;
        self.read_entries()
    }

    /// A TorchScript module to train further; its variables are registered at `at`.
    ///
    /// # Errors
    /// As [`Snapshot::open`]; a name that is not there; libtorch's.
    pub fn trainable_script(&self, name: &str, at: nn::Path<'_>) -> Result<TrainableCModule> {
        Ok(TrainableCModule::load_data(&mut self.script_file(name)?, at)?)
    }

    /// A TorchScript module.
    ///
    /// # Errors
    /// As [`Snapshot::trainable_script`].
    pub fn script(&self, name: &str) -> Result<CModule> {
        Ok(CModule::load_data(&mut self.script_file(name)?)?)
    }

    fn script_file(&self, name: &str) -> Result<std::fs::File> {
        let mut file = self.files.script(name)?;
        file.seek(SeekFrom::Start(0)).map_err(|source| failed("reading", &self.path, source))?;
        Ok(file)
    }

    fn read_entries(&self) -> Result<BTreeMap<String, State>> {
        let mut entries = BTreeMap::new();
        for name in &self.files.manifest.entries {
            let prefix = format!("{ENTRIES}{name}.");
            let mut state = State::default();
            for full in self.files.under(&prefix) {
                if let (Some(key), Some(value)) = (full.strip_prefix(&prefix), self.files.copy(full)?) {
                    state.insert(key, value);
                }
            }
            entries.insert(name.clone(), state);
        }
        Ok(entries)
    }
}
