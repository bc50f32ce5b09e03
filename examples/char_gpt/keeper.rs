//! Saves the run, and goes on with one that was saved.

use memfit::snapshot::Extras;
use memfit::{Snapshots, State, Value};

use crate::flags::Flags;
use crate::gpt::{Failure, Random, Text, Training};

/// The entry that holds what the stack does not know.
const ENTRY: &str = "char_gpt";

/// Snapshots of one run; without a folder it does nothing.
pub struct Keeper {
    snapshots: Option<Snapshots>,
    every: u64,
    /// What a resumed run must have in common with the saved one.
    settings: String,
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
        Ok(Self { snapshots: snapshots.transpose()?, every: flags.snapshot_every, settings, saved_at: None })
    }

    /// Brings the newest snapshot back where the user wants to resume, and gives the steps done.
    /// A fresh run saves at once: what is wrong with the folder shows before hours have passed.
    ///
    /// # Errors
    /// A damaged snapshot, other flags than those it was saved under: the training is as it
    /// was. A fresh run in a folder that has snapshots.
    pub fn begin(
        &mut self,
        flags: &Flags,
        training: &mut Training,
        random: &mut Random,
    ) -> Result<u64, Failure> {
        let Some(snapshots) = &self.snapshots else { return Ok(0) };
        let folder = flags.snapshot.clone().unwrap_or_default();
        let folder = folder.display();
        if !flags.resume {
            if !snapshots.paths()?.is_empty() {
                return Err(format!("{folder} has snapshots: go on with --resume, or name another").into());
            }
            self.save(0, training, random)?;
            return Ok(0);
        }
        let Some(snapshot) = snapshots.latest()? else {
            if !snapshots.paths()?.is_empty() {
                return Err(format!("every snapshot in {folder} is damaged: name another folder").into());
            }
            println!("there is no snapshot in {folder} yet: starting from the beginning\n");
            self.save(0, training, random)?;
            return Ok(0);
        };
        let entry = snapshot.entries()?.remove(ENTRY).unwrap_or_default();
        let (done, state) = self.matching(&entry)?;
        snapshot.resume(&mut training.stack)?;
        *random = Random::new(state);
        self.saved_at = Some(done);
        println!("going on after step {done}, from {}\n", snapshot.path().display());
        Ok(done)
    }

    /// Steps done and the state of the numbers that pick rows, if the settings are these.
    fn matching(&self, entry: &State) -> Result<(u64, u64), Failure> {
        let settings = match entry.get("settings") {
            Some(Value::Text(settings)) => settings,
            _ => return Err("the snapshot is not one of char_gpt's".into()),
        };
        if *settings != self.settings {
            let wanted = &self.settings;
            return Err(format!("the snapshot was saved with {settings}; these flags have {wanted}").into());
        }
        match (entry.get("done"), entry.get("random")) {
            (Some(Value::Int(done)), Some(Value::Int(random))) if *done >= 0 => {
                Ok((*done as u64, *random as u64))
            }
            _ => Err("the snapshot does not say how far it is".into()),
        }
    }

    /// Saves every so many steps.
    ///
    /// # Errors
    /// A full disk: the snapshots before it are intact.
    pub fn step(&mut self, done: u64, training: &mut Training, random: &Random) -> Result<(), Failure> {
        if done.is_multiple_of(self.every) { self.save(done, training, random) } else { Ok(()) }
    }

    /// Saves what was not saved yet and says how to go on.
    ///
    /// # Errors
    /// As [`Keeper::step`].
    pub fn end(
        &mut self,
        done: u64,
        steps: u64,
        training: &mut Training,
        random: &Random,
    ) -> Result<(), Failure> {
        if self.snapshots.is_some() && self.saved_at != Some(done) {
            self.save(done, training, random)?;
        }
        if self.snapshots.is_some() && done < steps {
            println!("\nsaved after step {done}; the same flags and --resume go on from there");
        }
        Ok(())
    }

    fn save(&mut self, done: u64, training: &mut Training, random: &Random) -> Result<(), Failure> {
        let Some(snapshots) = &mut self.snapshots else { return Ok(()) };
        let mut entry = State::default();
        entry.insert("settings", Value::Text(self.settings.clone()));
        entry.insert("done", Value::Int(done as i64));
        entry.insert("random", Value::Int(random.state() as i64));
        snapshots.save(&mut training.stack, &Extras::new().entry(ENTRY, entry))?;
        self.saved_at = Some(done);
        Ok(())
    }
}
