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

/// Rows of [`CONTEXT`] tokens, and the tokens that follow them.
pub fn loader(path: &Path, batch: usize, workers: usize, shuffled: bool) -> Result<Pairs, Failure> {
    let loader = Loader::new(rows(path)?).batch(batch).workers(workers).prefetch(crate::PREFETCH);
    Ok(if shuffled { loader.shuffle(1).build() } else { loader.build() }?)
}

/// Uses once what a loader uses.
pub fn warm_up(path: &Path) -> Result<(), Failure> {
    let (inputs, _) = rows(path)?.get(0, &mut Random::of_sample(0, 0, 0))?;
    let _ = Tensor::from_slice(&inputs);
    Ok(())
}

fn rows(path: &Path) -> Result<NextToken<u16>, Failure> {
    Ok(Tokens::open(path)?.next_token(CONTEXT)?)
}
