use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memfit::data::{Csv, Fields, Loader, Part, Random, Row};
use memfit::tch::{Device, Tensor};
use memfit::{Error, Result};

use super::Failure;

/// Of a picture of 8×8.
const SIDE: usize = 8;
const PIXELS: usize = SIDE * SIDE;
/// The brightest pixel.
const WHITE: u8 = 16;

/// Pixels from 0 to 1, row by row, and the digit that they show.
type Digit = ([f32; PIXELS], i64);

/// A batch: pixels `[n, 64]` and labels `[n]`.
pub type Pictures = (Tensor, Tensor);

/// A file of digits, read anew in each epoch: no more of it is in memory than the loader's batches
/// and its shuffle buffer.
pub struct Digits {
    file: PathBuf,
    rows: u64,
}

impl Digits {
    /// Reads the file once, so that what is wrong with it shows before anything begins.
    ///
    /// # Errors
    /// A file that is not there, or that holds anything but digits.
    pub fn of_file(file: &Path) -> std::result::Result<Self, Failure> {
        let name = file.display();
        match fs::metadata(file) {
            Ok(about) if about.is_dir() => {
                return Err(format!("{name} is a folder; name a file with --data").into());
            }
            Ok(about) if !about.is_file() => {
                return Err(format!("{name} is not a regular file; name one with --data").into());
            }
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(format!(
                    "there is no {name}: fetch it with `cargo xtask digits`, or name another with --data"
                )
                .into());
            }
            Err(error) => return Err(format!("cannot read {name}: {error}").into()),
        }
        let mut rows = 0;
        for batch in Loader::stream(Csv::of_file(file).no_header()).map(digit).batch(256).build()? {
            rows += batch?.batch.1.size()[0] as u64;
        }
        if rows < 10 {
            return Err(format!("{name} has {rows} digits, at least 10 are needed").into());
        }
        Ok(Self { file: file.to_owned(), rows })
    }

    /// All but the last fifth.
    pub fn training_rows(&self) -> u64 {
        self.rows - self.validation_rows()
    }

    pub fn validation_rows(&self) -> u64 {
        self.rows / 5
    }

    /// Batches to train on, in another order in each epoch, no picture twice as it was.
    ///
    /// # Errors
    /// The loader's.
    pub fn training(
        &self,
        batch: usize,
        seed: u64,
        workers: usize,
        device: Device,
    ) -> Result<Loader<Pictures>> {
        // The shuffle buffer, of 10,000 rows, has room for all: any order is as likely.
        let part = Loader::stream(self.part(0..self.training_rows())).shuffle(seed);
        part.map(digit).map(disturbed).batch(batch).workers(workers).pin(device).build()
    }

    /// Batches to validate with, always the same.
    ///
    /// # Errors
    /// The loader's.
    pub fn validation(&self, workers: usize, device: Device) -> Result<Loader<Pictures>> {
        Loader::stream(self.part(self.training_rows()..self.rows))
            .map(digit)
            .batch(64)
            .workers(workers)
            .pin(device)
            .build()
    }

    fn part(&self, range: Range<u64>) -> Part<Csv> {
        Part::of(Csv::of_file(&self.file).no_header(), range)
    }
}

/// Runs on the workers.
fn digit(row: Row, _: &mut Random) -> Result<Digit> {
    if row.len() != PIXELS + 1 {
        let found = row.len();
        return Err(Error::data(format!("{found} fields, where a digit has {PIXELS} pixels and its label")));
    }
    let numbers: Vec<u8> = Fields::from(..).of(&row)?;
    let (pixels, label) = numbers.split_at(PIXELS);
    if let Some(at) = pixels.iter().position(|pixel| *pixel > WHITE) {
        return Err(Error::data(format!("field {at}: {} is above {WHITE}, which is white", pixels[at])));
    }
    match label {
        [label @ 0..=9] => {
            let pixel = |at: usize| f32::from(pixels[at]) / f32::from(WHITE);
            Ok((std::array::from_fn(pixel), i64::from(*label)))
        }
        _ => Err(Error::data(format!("field {PIXELS}: {label:?} is no digit"))),
    }
}

/// The picture up to a pixel off, with some noise; by the sample's own random numbers, so that the
/// number of workers changes nothing, and a resumed run nothing either.
fn disturbed((pixels, label): Digit, random: &mut Random) -> Result<Digit> {
    let (down, right) = (random.below(3) as usize, random.below(3) as usize);
    let moved = std::array::from_fn(|at| {
        // Offsets of 0, 1 and 2 stand for −1, 0 and 1; beyond the border it is black.
        let (y, x) = ((at / SIDE + down).wrapping_sub(1), (at % SIDE + right).wrapping_sub(1));
        let inside = y < SIDE && x < SIDE;
        let pixel = if inside { pixels[y * SIDE + x] } else { 0.0 };
        pixel + 0.05 * random.normal() as f32
    });
    Ok((moved, label))
}
