//! Saves the run, and goes on with one that was saved.

use memfit::snapshot::Extras;
use memfit::{Snapshots, State, Value};

use crate::flags::Flags;
use crate::gpt::{Failure, Text, Training};

/// The entry that holds what the stack does not know.
const ENTRY: &str = "char_gpt";

/// Snapshots of one run; without a folder it does nothing.
pub struct Keeper {
    snapshots: Option<Snapshots>,
    every: u64,
    /// What a resumed run must have in common with the saved one.
    settings: String,
    /// Of the text's order.
    seed: u64,
    saved_at: Option<u64>,
}

impl Keeper {
    /// # Errors
    /// A folder that cannot be made.
    pub fn new(flags: &Flags, text: &Text) -> Result<Self, Failure> {
        let folder = flags.snapshot.as_ref();
        let snapshots =
            folder.map(|folder| Snapshots::in_folder(folder).map(|snapshots| snapshots.keep_last(2)));
        let config = flags.config();
        let settings = format!(
            "{}, batch {}, context {}, dropout {}, text of {} bytes ({:x})",
            flags.plan().optimizer.name(),
            config.batch,
            config.context,
            config.dropout,
            text.len(),
            text.fingerprint()
        );
        let (every, seed) = (flags.snapshot_every, flags.seed());
        Ok(Self { snapshots: snapshots.transpose()?, every, settings, seed, saved_at: None })
    }

    /// The seed of the text's order: the flags', or that of the run that goes on.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Brings the newest snapshot back where the user wants to resume, and gives the steps done.
    /// A fresh run saves at once: what is wrong with the folder shows before hours have passed.
    ///
    /// # Errors
    /// A damaged snapshot, other flags than those it was saved under: the training is as it
    /// was. A fresh run in a folder that has snapshots.
    pub fn begin(&mut self, flags: &Flags, training: &mut Training) -> Result<u64, Failure> {
        let Some(snapshots) = &self.snapshots else { return Ok(0) };
        let folder = flags.snapshot.clone().unwrap_or_default();
        let folder = folder.display();
        if !flags.resume {
            if !snapshots.paths()?.is_empty() {
                return Err(format!("{folder} has snapshots: go on with --resume, or name another").into());
            }
            self.save(0, training)?;
            return Ok(0);
        }
        let Some(snapshot) = snapshots.latest()? else {
            if !snapshots.paths()?.is_empty() {
                return Err(format!("every snapshot in {folder} is damaged: name another folder").into());
            }
            println!("there is no snapshot in {folder} yet: starting from the beginning\n");
            self.save(0, training)?;
            return Ok(0);
        };
        let entry = snapshot.entries()?.remove(ENTRY).unwrap_or_default();
        self.seed = self.matching(&entry)?;
        // A skipped step is a window that ended.
        let done = snapshot.resume(&mut training.stack)?.position.windows;
        self.saved_at = Some(done);
        println!("going on after step {done}, from {}\n", snapshot.path().display());
        Ok(done)
    }

    /// The seed of the text's order, if the settings are these.
    fn matching(&self, entry: &State) -> Result<u64, Failure> {
        let settings = match entry.get("settings") {
            Some(Value::Text(settings)) => settings,
            _ => return Err("the snapshot is not one of char_gpt's".into()),
        };
        if *settings != self.settings {
            let wanted = &self.settings;
            return Err(format!("the snapshot was saved with {settings}; these flags have {wanted}").into());
        }
        match entry.get("seed") {
            Some(Value::Int(seed)) => Ok(*seed as u64),
            _ => Err("the snapshot does not say its seed".into()),
        }
    }

    /// Saves every so many steps.
    ///
    /// # Errors
    /// A full disk: the snapshots before it are intact.
    pub fn step(&mut self, done: u64, training: &mut Training) -> Result<(), Failure> {
        if done.is_multiple_of(self.every) { self.save(done, training) } else { Ok(()) }
    }

    /// Saves what was not saved yet and says how to go on.
    ///
    /// # Errors
    /// As [`Keeper::step`].
    pub fn end(&mut self, done: u64, steps: u64, training: &mut Training) -> Result<(), Failure> {
        if self.snapshots.is_some() && self.saved_at != Some(done) {
            self.save(done, training)?;
        }
        if self.snapshots.is_some() && done < steps {
            println!("\nsaved after step {done}; the same flags and --resume go on from there");
        }
        Ok(())
    }

    fn save(&mut self, done: u64, training: &mut Training) -> Result<(), Failure> {
        let Some(snapshots) = &mut self.snapshots else { return Ok(()) };
        let mut entry = State::default();
        entry.insert("settings", Value::Text(self.settings.clone()));
        entry.insert("seed", Value::Int(self.seed as i64));
        snapshots.save(&mut training.stack, &Extras::new().entry(ENTRY, entry))?;
        self.saved_at = Some(done);
        Ok(())
    }
}
