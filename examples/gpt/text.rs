use std::fs;
use std::path::{Path, PathBuf};

use memfit::data::{Loader, Random, Source, Tail, Tokens};
use memfit::tch::{Device, Tensor};

use super::{Config, Failure};

/// Of a longer text so many bytes, spread over all of it, tell its entropy and its fingerprint.
const LOOKED_AT: u64 = 4 << 20;
/// They are read in blocks of this many.
const BLOCK: u64 = 16 << 10;

/// Rows of text and the byte that follows each of their bytes: two of `[batch, context]`.
pub type Rows = (Tensor, Tensor);

/// Bytes to train on, and the last tenth to validate with. A file stays a file: only what a batch
/// needs is read.
pub struct Text {
    bytes: Tokens<u8>,
    /// Where the validation text begins.
    validation: u64,
    name: String,
    entropy: f64,
    fingerprint: u64,
}

impl Text {
    /// This repository's own sources and documents, in memory.
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
        Self::new(Tokens::of(bytes), context, "this repository's text".to_owned())
    }

    /// A file of any length.
    ///
    /// # Errors
    /// A file that cannot be read or is too short for a few rows.
    pub fn of_file(file: &Path, context: i64) -> Result<Self, Failure> {
        let name = file.display().to_string();
        let about = fs::metadata(file).map_err(|error| format!("cannot read {name}: {error}"))?;
        if !about.is_file() {
            let kind = if about.is_dir() { "a folder" } else { "not a regular file" };
            return Err(format!("{name} is {kind}; name a file").into());
        }
        if about.len() == 0 {
            return Err(format!("{name} is empty").into());
        }
        Self::new(Tokens::open(file)?, context, name)
    }

    fn new(bytes: Tokens<u8>, context: i64, name: String) -> Result<Self, Failure> {
        let (found, least) = (bytes.len(), 20 * (context as u64 + 1));
        if found < least {
            return Err(format!("{name} has {found} bytes, at least {least} are needed").into());
        }
        let (entropy, fingerprint) = look(&bytes)?;
        Ok(Self { bytes, validation: found - found / 10, name, entropy, fingerprint })
    }

    /// Batches to train on, in another order in each epoch: rows one after the other, each byte an
    /// input once. Threads read ahead, where there are any.
    ///
    /// # Errors
    /// A text with fewer rows than one batch.
    pub fn loader(&self, config: &Config, seed: u64, workers: usize) -> Result<Loader<Rows>, Failure> {
        let rows = self.bytes.range(0..self.validation)?.next_token(config.context as u64)?;
        let (found, batch) = (rows.len(), config.batch as u64);
        if found < batch {
            let name = &self.name;
            let context = config.context;
            return Err(format!(
                "{name} has {found} rows of {context} bytes to train on, and a batch has {batch}; name a longer \
                 text or a smaller --batch"
            )
            .into());
        }
        // Each batch is a whole one, so that any split of it has equal parts.
        let loader = Loader::new(rows).batch(config.batch as usize).tail(Tail::Drop).shuffle(seed);
        Ok(loader.workers(workers).build()?)
    }

    /// Rows that begin anywhere in the text to train on.
    ///
    /// # Errors
    /// A file that was cut or cannot be read any more.
    pub fn batch(&self, config: &Config, random: &mut Random, device: Device) -> Result<Rows, Failure> {
        let room = self.validation.saturating_sub(config.context as u64);
        let starts: Vec<u64> = (0..config.batch).map(|_| random.below(room)).collect();
        self.rows(&starts, config.context, device)
    }

    /// The same rows of the validation text each time, spread over all of it.
    ///
    /// # Errors
    /// As [`Text::batch`].
    pub fn validation(&self, config: &Config, rows: u64, device: Device) -> Result<Rows, Failure> {
        let room = (self.bytes.len() - self.validation).saturating_sub(config.context as u64);
        let starts: Vec<u64> = (0..rows).map(|row| self.validation + row * room / rows).collect();
        self.rows(&starts, config.context, device)
    }

    fn rows(&self, starts: &[u64], context: i64, device: Device) -> Result<Rows, Failure> {
        let (mut inputs, mut next) = (Vec::new(), Vec::new());
        for start in starts {
            let row = self.bytes.read(*start..start + context as u64 + 1)?;
            let (last, first) = (row.get(1..).unwrap_or_default(), row.get(..context as usize));
            inputs.extend_from_slice(first.unwrap_or_default());
            next.extend_from_slice(last);
        }
        let size = [starts.len() as i64, context];
        let tensor = |flat: &[i64]| Tensor::from_slice(flat).view(size).to_device(device);
        Ok((tensor(&inputs), tensor(&next)))
    }

    /// The bytes to train on, all of them.
    ///
    /// # Errors
    /// As [`Text::batch`].
    pub fn train(&self) -> Result<Vec<u8>, Failure> {
        Ok(self.bytes.read(0..self.validation)?.into_iter().map(|byte| byte as u8).collect())
    }

    /// A number that another text of this length does not have, but for chance and for changes
    /// between the blocks that are looked at, where it is longer than 4 MiB (FNV-1a).
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Bytes in all.
    pub fn len(&self) -> u64 {
        self.bytes.len()
    }

    /// What guessing each byte by its frequency alone costs, in nats; of what is looked at, where
    /// the text is longer than 4 MiB.
    pub fn entropy(&self) -> f64 {
        self.entropy
    }
}

/// Entropy and fingerprint, of all bytes or of blocks from the first byte to the last.
fn look(bytes: &Tokens<u8>) -> Result<(f64, u64), Failure> {
    let (len, blocks) = (bytes.len(), bytes.len().min(LOOKED_AT).div_ceil(BLOCK));
    let (mut counts, mut sum) = ([0_u64; 256], 0xcbf2_9ce4_8422_2325_u64);
    for block in 0..blocks {
        let start = if len > LOOKED_AT { block * (len - BLOCK) / (blocks - 1) } else { block * BLOCK };
        for byte in bytes.read(start..(start + BLOCK).min(len))? {
            counts[usize::from(byte as u8)] += 1;
            sum = (sum ^ byte as u64).wrapping_mul(0x100_0000_01b3);
        }
    }
    let total = counts.iter().sum::<u64>() as f64;
    let shares = counts.iter().filter(|count| **count > 0).map(|count| *count as f64 / total);
    Ok((shares.map(|share| share * share.recip().ln()).sum::<f64>(), sum))
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
