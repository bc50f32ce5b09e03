//! What both sides start from, as files: weights, text, and where each row begins.

use std::fs;
use std::path::Path;

use memfit::data::Random;
use memfit::tch::{self, Device, Tensor, nn};

use crate::gpt::{Config, Failure, Gpt, Recompute, Text};

pub const WEIGHTS: &str = "weights.safetensors";
const TEXT: &str = "text";
const OFFSETS: &str = "offsets";
/// Rows with an offset of their own; then they begin again.
const ROWS: usize = 4096;

/// Writes the three files.
///
/// # Errors
/// A folder that cannot be written to.
pub fn write(folder: &Path, config: &Config) -> Result<(), Failure> {
    tch::manual_seed(1);
    let vs = nn::VarStore::new(Device::Cpu);
    let _model = Gpt::new(&vs.root(), config, Recompute::Never);
    vs.save(folder.join(WEIGHTS))?;
    let text = Text::of_this_project(config.context)?;
    let train = text.train()?;
    fs::write(folder.join(TEXT), &train)?;
    let mut random = Random::of_sample(1, 0, 0);
    let room = train.len() as u64 - config.context as u64;
    let offsets: Vec<String> = (0..ROWS).map(|_| random.below(room).to_string()).collect();
    Ok(fs::write(folder.join(OFFSETS), offsets.join("\n"))?)
}

/// The text and the offsets, read back, and how far they were used.
pub struct Start {
    text: Vec<u8>,
    offsets: Vec<usize>,
    at: usize,
}

impl Start {
    /// # Errors
    /// Files that [`write`] did not write.
    pub fn read(folder: &Path) -> Result<Self, Failure> {
        let text = fs::read(folder.join(TEXT))?;
        let offsets = fs::read_to_string(folder.join(OFFSETS))?;
        let offsets = offsets.lines().map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        Ok(Self { text, offsets, at: 0 })
    }

    /// The next rows and the byte that follows each byte: two `[batch, context]`.
    ///
    /// # Errors
    /// An offset beyond the text.
    pub fn batch(&mut self, config: &Config) -> Result<(Tensor, Tensor), Failure> {
        let (rows, length) = (config.batch as usize, config.context as usize);
        let (mut bytes, mut next) = (Vec::new(), Vec::new());
        for row in self.at..self.at + rows {
            let start = self.offsets[row % self.offsets.len()];
            let row = self.text.get(start..=start + length).ok_or("an offset beyond the text")?;
            bytes.extend(row[..length].iter().map(|byte| i64::from(*byte)));
            next.extend(row[1..].iter().map(|byte| i64::from(*byte)));
        }
        self.at += rows;
        let tensor = |flat: &[i64]| Tensor::from_slice(flat).view([config.batch, config.context]);
        Ok((tensor(&bytes), tensor(&next)))
    }
}
