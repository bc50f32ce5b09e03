//! What the command line can say.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Parser, ValueEnum, value_parser};
use memfit::memory::Bytes;

use crate::gpt::{Amp, Choice, Config, Plan, Recompute, Split, Watch, When};

/// Trains a byte-level GPT on text, within an enforced memory budget.
#[derive(Debug, Parser)]
#[command(name = "char_gpt")]
pub struct Flags {
    /// Live bytes never exceed this: a number with MB, MiB, GB or GiB [default: 250MiB, with
    /// --micro-batch 270MB]
    #[arg(long)]
    budget: Option<Bytes>,
    /// Arithmetic in half precision [default: bf16, with --micro-batch off]
    #[arg(long, value_enum)]
    amp: Option<Precision>,
    /// Blocks whose activations are recomputed: off, all, or N for the first of every N [default:
    /// all, with --micro-batch off]
    #[arg(long, value_parser = recompute)]
    checkpoint: Option<Recompute>,
    /// Micro-batches that each batch is split into
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u16).range(1..))]
    accumulate: u16,
    /// Find the largest micro-batch that fits, by running out of memory and trying fewer rows
    #[arg(long, value_enum, conflicts_with = "accumulate")]
    micro_batch: Option<MicroBatch>,
    /// Keep activations in files in this folder
    #[arg(long, value_name = "DIR")]
    offload: Option<PathBuf>,
    /// Keep the optimizer's state in files in this folder
    #[arg(long, value_name = "DIR")]
    offload_optimizer: Option<PathBuf>,
    /// Keep the blocks' weights in files in this folder
    #[arg(long, value_name = "DIR")]
    offload_parameters: Option<PathBuf>,
    /// Save the training in this folder, at the end and where it is interrupted too
    #[arg(long, value_name = "DIR")]
    pub snapshot: Option<PathBuf>,
    /// Steps between two snapshots
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = value_parser!(u64).range(1..))]
    pub snapshot_every: u64,
    /// Go on from the newest snapshot in the folder
    #[arg(long, requires = "snapshot")]
    pub resume: bool,
    /// Stop after so many steps of this call, as Ctrl-C does
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..))]
    pub pause_after: Option<u64>,
    /// Print the loss of each step
    #[arg(long)]
    pub losses: bool,
    /// Append what memory is in use, twice a second, as lines of JSON to this file
    #[arg(long, value_name = "FILE")]
    pub monitor: Option<PathBuf>,
    /// Updates to make
    #[arg(long, value_parser = value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// Rows of text in one batch
    #[arg(long, value_parser = value_parser!(u16).range(1..=4096))]
    batch: Option<u16>,
    /// How the weights are updated
    #[arg(long, default_value = Choice::AdamW.name(), value_parser = choice())]
    optimizer: Choice,
    /// Update each weight as soon as its gradient is final; gradients are not clipped then
    #[arg(long)]
    in_backward: bool,
    /// Highest learning rate; without it, one that suits the optimizer
    #[arg(long, value_parser = |text: &str| number(text, 0.0, 10.0))]
    lr: Option<f64>,
    /// Share of each block's output that is dropped in training
    #[arg(long, default_value = "0.1", value_parser = |text: &str| number(text, 0.0, 0.99))]
    dropout: f64,
    /// Same seed, same run
    #[arg(long)]
    seed: Option<u32>,
    /// Threads that read the text ahead of the training; 0 reads in the training's own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u8).range(..=64))]
    workers: u8,
    /// Text to train on, of any length; without it, this repository's own sources and documents
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Write the last step's memory there: a chart as SVG and PNG, a page to hover over, a trace for
    /// Perfetto [default: target/char_gpt in this repository]
    #[arg(long, value_name = "DIR")]
    charts: Option<PathBuf>,
    /// Write no charts
    #[arg(long, conflicts_with = "charts")]
    no_charts: bool,
    /// A small model that trains in seconds
    #[arg(long)]
    small: bool,
    /// Leave out the table that compares stacks
    #[arg(long)]
    pub no_table: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Precision {
    Off,
    Bf16,
    Fp16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum MicroBatch {
    Auto,
}

impl Flags {
    /// The bytes that are never exceeded.
    pub fn budget(&self) -> Bytes {
        let usual = if self.micro_batch.is_some() { Bytes(270_000_000) } else { Bytes(250 << 20) };
        self.budget.unwrap_or(usual)
    }

    /// Where charts go, if they are wanted.
    pub fn charts(&self) -> Option<PathBuf> {
        let usual = || Path::new(env!("CARGO_MANIFEST_DIR")).join("target").join("char_gpt");
        (!self.no_charts).then(|| self.charts.clone().unwrap_or_else(usual))
    }

    /// The model and its batches.
    pub fn config(&self) -> Config {
        let size = if self.small { Config::small() } else { Config::reference() };
        let batch = self.batch.map_or(size.batch, i64::from);
        Config { batch, dropout: self.dropout, ..size }
    }

    /// The strategies.
    pub fn plan(&self) -> Plan {
        // Nothing but the split, unless it is asked for: that is what is shown then.
        let (amp, recompute) = match self.micro_batch {
            Some(MicroBatch::Auto) => (Precision::Off, Recompute::Never),
            None => (Precision::Bf16, Recompute::Every(1)),
        };
        Plan {
            amp: match self.amp.unwrap_or(amp) {
                Precision::Off => Amp::Off,
                Precision::Bf16 => Amp::Bf16,
                Precision::Fp16 => Amp::Fp16,
            },
            recompute: self.checkpoint.unwrap_or(recompute),
            split: match (self.micro_batch, self.accumulate) {
                (Some(MicroBatch::Auto), _) => Split::AsFits,
                (None, 1) => Split::Whole,
                (None, micro_batches) => Split::Into(usize::from(micro_batches)),
            },
            activations: self.offload.clone(),
            optimizer: self.optimizer,
            when: if self.in_backward { When::InBackward } else { When::AfterBackward },
            state: self.offload_optimizer.clone(),
            weights: self.offload_parameters.clone(),
            lr: self.lr.unwrap_or_else(|| self.optimizer.rate(&self.config())),
            watch: if self.no_charts { Watch::Off } else { Watch::Timeline },
        }
    }

    /// Updates to make.
    pub fn steps(&self) -> u64 {
        self.steps.unwrap_or(if self.small { 300 } else { 80 })
    }

    /// Threads that read ahead.
    pub fn workers(&self) -> usize {
        usize::from(self.workers)
    }

    /// The seed, or one from the clock.
    pub fn seed(&self) -> u64 {
        let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.subsec_nanos());
        u64::from(self.seed.unwrap_or_else(clock))
    }
}

fn recompute(text: &str) -> Result<Recompute, String> {
    match (text, text.parse()) {
        ("off", _) => Ok(Recompute::Never),
        ("all", _) => Ok(Recompute::Every(1)),
        (_, Ok(n)) if n > 0 => Ok(Recompute::Every(n)),
        _ => Err("neither off, all nor a number above 0".to_owned()),
    }
}

fn choice() -> impl TypedValueParser<Value = Choice> {
    let names = PossibleValuesParser::new(Choice::ALL.map(Choice::name));
    names.map(|name| Choice::named(&name).unwrap_or(Choice::AdamW))
}

fn number(text: &str, least: f64, most: f64) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(format!("not a number from {least} to {most}")),
    }
}
