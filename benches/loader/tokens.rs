//! Rows of a token file.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use memfit::Error;
use memfit::data::{Loader, Random, Source};

use crate::{Failure, Pairs};

pub const CONTEXT: usize = 256;
/// Tokens that occur.
pub const VOCABULARY: u64 = 4096;

pub fn write(path: &Path, count: u64) -> Result<(), Failure> {
    let mut file = BufWriter::new(File::create(path)?);
    let mut random = Random::of_sample(1, 0, 0);
    for _ in 0..count {
        file.write_all(&(random.below(VOCABULARY) as u16).to_le_bytes())?;
    }
    Ok(file.flush()?)
}

/// Rows of [`CONTEXT`] tokens, and the tokens that follow them.
pub fn loader(path: &Path, batch: usize, workers: usize, shuffled: bool) -> Result<Pairs, Failure> {
    let loader = Loader::new(Rows::open(path)?).batch(batch).workers(workers);
    Ok(if shuffled { loader.shuffle(1).build() } else { loader.build() }?)
}

/// Uses once what a loader uses.
pub fn warm_up(path: &Path) -> Result<(), Failure> {
    let row = Rows::open(path)?.get(0, &mut Random::of_sample(0, 0, 0))?;
    let _ = memfit::tch::Tensor::from_slice(&row.0);
    Ok(())
}

struct Rows {
    file: File,
    rows: u64,
}

impl Rows {
    fn open(path: &Path) -> Result<Self, Failure> {
        let tokens = fs::metadata(path)?.len() / 2;
        Ok(Self { file: File::open(path)?, rows: tokens.saturating_sub(1) / CONTEXT as u64 })
    }
}

impl Source for Rows {
    type Sample = (Vec<i64>, Vec<i64>);

    fn len(&self) -> u64 {
        self.rows
    }

    fn get(&self, index: u64, _: &mut Random) -> memfit::Result<Self::Sample> {
        let mut bytes = [0; 2 * (CONTEXT + 1)];
        let read = self.file.read_exact_at(&mut bytes, index * 2 * CONTEXT as u64);
        read.map_err(|error| Error::data(error.to_string()))?;
        let token = |pair: &[u8]| i64::from(u16::from_le_bytes([pair[0], pair[1]]));
        let row: Vec<i64> = bytes.chunks_exact(2).map(token).collect();
        Ok((row[..CONTEXT].to_vec(), row[1..].to_vec()))
    }
}
