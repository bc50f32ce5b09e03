use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use memfit::tch::{Device, Tensor};

use super::{Config, Failure};

/// No more of a file is read.
const MOST: u64 = 64 << 20;

/// Bytes to train on and bytes kept apart to validate with.
pub struct Text {
    train: Vec<u8>,
    validation: Vec<u8>,
}

impl Text {
    /// This repository's own sources and documents.
    ///
    /// # Errors
    /// Where the repository is not where it was built from.
    pub fn of_this_project(context: i64) -> Result<Self, Failure> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut files = vec![root.join("README.md")];
        for folder in ["docs", "examples", "src"] {
            collect(&root.join(folder), &mut files);
        }
        files.retain(|file| file.is_file());
        files.sort();
        let mut bytes = Vec::new();
        for file in &files {
            bytes.extend(fs::read(file).map_err(|error| format!("cannot read {}: {error}", file.display()))?);
        }
        if bytes.is_empty() {
            let root = root.display();
            return Err(format!("no sources in {root} to train on; name a text with --text FILE").into());
        }
        Self::split(bytes, context, "this repository's text")
    }

    /// The first 64 MiB of a file.
    ///
    /// # Errors
    /// A file that cannot be read or is too short for a few rows.
    pub fn of_file(file: &Path, context: i64) -> Result<Self, Failure> {
        let name = file.display().to_string();
        let unreadable = |error: std::io::Error| format!("cannot read {name}: {error}");
        let about = fs::metadata(file).map_err(unreadable)?;
        if !about.is_file() {
            let kind = if about.is_dir() { "a folder" } else { "not a regular file" };
            return Err(format!("{name} is {kind}; name a file").into());
        }
        let mut bytes = Vec::new();
        fs::File::open(file).and_then(|file| file.take(MOST).read_to_end(&mut bytes)).map_err(unreadable)?;
        Self::split(bytes, context, &name)
    }

    /// The last tenth validates.
    fn split(mut train: Vec<u8>, context: i64, name: &str) -> Result<Self, Failure> {
        let least = 20 * (context as usize + 1);
        if train.len() < least {
            let found = train.len();
            return Err(format!("{name} has {found} bytes, at least {least} are needed").into());
        }
        let validation = train.split_off(train.len() - train.len() / 10);
        Ok(Self { train, validation })
    }

    /// The bytes to train on.
    pub fn train(&self) -> &[u8] {
        &self.train
    }

    /// A number that another text does not have, but for chance (FNV-1a).
    pub fn fingerprint(&self) -> u64 {
        let bytes = self.train.iter().chain(&self.validation);
        bytes.fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
    }

    /// Bytes in all.
    pub fn len(&self) -> usize {
        self.train.len() + self.validation.len()
    }

    /// What guessing each byte by its frequency alone costs, in nats.
    pub fn entropy(&self) -> f64 {
        let mut counts = [0_u32; 256];
        for byte in self.train.iter().chain(&self.validation) {
            counts[usize::from(*byte)] += 1;
        }
        let total = self.len() as f64;
        let shares = counts.iter().filter(|count| **count > 0).map(|count| f64::from(*count) / total);
        -shares.map(|share| share * share.ln()).sum::<f64>()
    }

    /// Random rows to train on, and the byte that follows each byte: two `[batch, context]`.
    pub fn batch(&self, config: &Config, random: &mut Random, device: Device) -> (Tensor, Tensor) {
        let room = self.train.len() - config.context as usize;
        let starts: Vec<usize> = (0..config.batch).map(|_| random.below(room)).collect();
        rows(&self.train, &starts, config.context, device)
    }

    /// The same rows of the validation text each time, spread over all of it.
    pub fn validation(&self, config: &Config, rows_wanted: usize, device: Device) -> (Tensor, Tensor) {
        let room = self.validation.len() - config.context as usize;
        let starts: Vec<usize> = (0..rows_wanted).map(|row| row * room / rows_wanted).collect();
        rows(&self.validation, &starts, config.context, device)
    }
}

/// The rows of `text` that begin at `starts`, and those one byte later.
fn rows(text: &[u8], starts: &[usize], context: i64, device: Device) -> (Tensor, Tensor) {
    let shifted = |by: usize| {
        let bytes = |start: &usize| &text[start + by..start + by + context as usize];
        let flat: Vec<i64> = starts.iter().flat_map(bytes).map(|byte| i64::from(*byte)).collect();
        Tensor::from_slice(&flat).view([starts.len() as i64, context]).to_device(device)
    };
    (shifted(0), shifted(1))
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => collect(&path, files),
            Ok(kind) if kind.is_file() && is_text(&path) => files.push(path),
            _ => {}
        }
    }
}

fn is_text(path: &Path) -> bool {
    let known = ["rs", "md", "cpp", "h", "py", "toml"];
    path.extension().and_then(|extension| extension.to_str()).is_some_and(|found| known.contains(&found))
}

/// Numbers of its own (SplitMix64), so that libtorch's generator stays with the model.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// What `new` takes to go on from here.
    pub fn state(&self) -> u64 {
        self.0
    }

    /// A number below `limit`; 0 for an empty range.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        (mixed % limit.max(1) as u64) as usize
    }
}
