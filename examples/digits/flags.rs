use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum, value_parser};
use memfit::memory::Bytes;

/// Trains a small ResNet with BatchNorm on 8×8 pictures of digits.
#[derive(Debug, Parser)]
#[command(name = "digits")]
pub struct Flags {
    /// Lines of 64 pixels of 0 to 16 and the digit, separated by commas, compressed or not; `cargo xtask
    /// digits` fetches it
    #[arg(long, value_name = "FILE", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/.data/digits.csv.gz"))]
    pub data: PathBuf,
    /// Epochs to train
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = value_parser!(u16).range(1..=10_000))]
    epochs: u16,
    /// Pictures in one batch
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = value_parser!(u16).range(2..=4096))]
    batch: u16,
    /// Threads that read and transform ahead of the training; 0 does it in the training's own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u8).range(..=64))]
    workers: u8,
    /// Cores that libtorch computes on; a model this small loses more than it gains by more of them
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u8).range(1..=64))]
    threads: u8,
    /// Same seed, same run
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u32,
    /// Live bytes never exceed this: a number with MB, MiB, GB or GiB
    #[arg(long, default_value = "64MiB")]
    budget: Bytes,
    /// Highest learning rate
    #[arg(long, value_name = "RATE", default_value = "0.003", value_parser = rate)]
    lr: f64,
    /// Arithmetic in half precision
    #[arg(long, value_enum, default_value = "off")]
    pub amp: Amp,
    /// Save the training in this folder after each epoch, and where it is interrupted
    #[arg(long, value_name = "DIR")]
    pub snapshot: Option<PathBuf>,
    /// Go on from the newest snapshot in the folder
    #[arg(long, requires = "snapshot")]
    pub resume: bool,
    /// Stop after so many steps of this call, as Ctrl-C does
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..))]
    pub pause_after: Option<u64>,
}

/// The dtype of the arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Amp {
    Off,
    Bf16,
    Fp16,
}

impl Flags {
    /// Reads the command line; prints what is asked for, or in a sentence what is wrong.
    pub fn read() -> Result<Self, ExitCode> {
        Self::try_parse().map_err(|error| {
            if !error.use_stderr() {
                print!("{error}");
                return ExitCode::SUCCESS;
            }
            let text = error.to_string();
            let sentence = text.split("\n\n").next().unwrap_or(&text).trim_start_matches("error: ");
            let sentence: Vec<&str> = sentence.split_whitespace().collect();
            eprintln!("digits: {}; --help tells the flags", sentence.join(" "));
            ExitCode::FAILURE
        })
    }

    pub fn epochs(&self) -> u64 {
        u64::from(self.epochs)
    }

    pub fn batch(&self) -> usize {
        usize::from(self.batch)
    }

    pub fn workers(&self) -> usize {
        usize::from(self.workers)
    }

    pub fn threads(&self) -> i32 {
        i32::from(self.threads)
    }

    pub fn seed(&self) -> u64 {
        u64::from(self.seed)
    }

    /// The bytes that are never exceeded.
    pub fn budget(&self) -> Bytes {
        self.budget
    }

    pub fn lr(&self) -> f64 {
        self.lr
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (0.0..=10.0).contains(&rate) => Ok(rate),
        _ => Err("not a number from 0 to 10".to_owned()),
    }
}
