//! Rows of a token file.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use memfit::data::{Loader, NextToken, Random, Source, Tokens};
use memfit::tch::Tensor;

use crate::{Failure, Pairs};

pub const CONTEXT: u64 = 256;
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

/// How tokens come out of their file.
#[derive(Clone, Copy, Debug)]
pub enum Reading {
    /// From a mapping of the file.
    Mapped,
    /// By positioned reads.
    ByPosition,
}

/// Rows of [`CONTEXT`] tokens, and the tokens that follow them.
pub fn loader(
    path: &Path,
    reading: Reading,
    batch: usize,
    workers: usize,
    shuffled: bool,
) -> Result<Pairs, Failure> {
    let loader = Loader::new(rows(path, reading)?).batch(batch).workers(workers);
    Ok(if shuffled { loader.shuffle(1).build() } else { loader.build() }?)
}

/// Uses once what a loader uses.
pub fn warm_up(path: &Path, reading: Reading) -> Result<(), Failure> {
    let (inputs, _) = rows(path, reading)?.get(0, &mut Random::of_sample(0, 0, 0))?;
    let _ = Tensor::from_slice(&inputs);
    Ok(())
}

fn rows(path: &Path, reading: Reading) -> Result<NextToken<u16>, Failure> {
    let tokens = Tokens::open(path)?;
    let tokens = match reading {
        Reading::Mapped => tokens.mapped()?,
        Reading::ByPosition => tokens,
    };
    Ok(tokens.next_token(CONTEXT)?)
}
