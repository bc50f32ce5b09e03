//! The optimizers in one table: bytes of state, time of an update, and what they learn.

mod table;

use super::Options;
use super::measure::{self, Measured, Spread};
use super::setup::Setup;
use crate::problem::Result;

/// A transformer's matrices and vectors at width 512, sixteen blocks: 50 million weights.
const BLOCKS: usize = 16;
const BLOCK: &str = "1536x512,1536,512x512,512,2048x512,2048,512x2048,512,512,512,512,512";
const SEEDS: usize = 3;
const STEPS: usize = 1_000;

/// One of memfit's optimizers and what it is held to.
#[derive(Clone, Copy)]
struct Optimizer {
    name: &'static str,
    words: &'static str,
    /// PyTorch's or torchao's own, by its name there.
    peer: Option<&'static str>,
    /// Slow ones take part in fewer rounds.
    pairs: usize,
    goals: Goals,
}

/// The most that each may be.
#[derive(Clone, Copy, Default)]
struct Goals {
    /// Bytes of state per weight.
    bytes: f64,
    /// An update's time over the peer's.
    time: Option<f64>,
    /// An update's time over that of PyTorch's fused AdamW.
    of_fused: Option<f64>,
    /// The final loss over AdamW's.
    loss: Option<f64>,
}

const fn optimizer(
    name: &'static str,
    words: &'static str,
    peer: Option<&'static str>,
    bytes: f64,
) -> Optimizer {
    let goals = Goals { bytes, time: None, of_fused: None, loss: None };
    Optimizer { name, words, peer, pairs: usize::MAX, goals }
}

impl Optimizer {
    const fn loss(mut self, most: f64) -> Self {
        self.goals.loss = Some(most);
        self
    }

    const fn time(mut self, most: f64) -> Self {
        self.goals.time = Some(most);
        self
    }

    const fn of_fused(mut self, most: f64) -> Self {
        self.goals.of_fused = Some(most);
        self
    }

    const fn pairs(mut self, pairs: usize) -> Self {
        self.pairs = pairs;
        self
    }
}

/// The first is what the others are compared with.
const OPTIMIZERS: [Optimizer; 7] = [
    optimizer("adamw", "`AdamW`", Some("adamw"), 8.0).time(1.0),
    optimizer("adamw-bf16", "`AdamW`, bf16 moments", None, 4.0).loss(1.03),
    optimizer("adamw8bit", "`AdamW8bit`", Some("adamw8bit"), 2.1).time(0.25).of_fused(5.0).loss(1.01),
    optimizer("sgd", "`Sgd`, momentum 0.9", Some("sgd"), 4.0),
    optimizer("lion", "`Lion`", None, 4.0).loss(1.03),
    optimizer("adafactor", "`Adafactor`", Some("adafactor"), 0.1).loss(1.03),
    optimizer("muon", "`Muon`, the rest by `AdamW`", Some("muon"), 4.1).loss(1.03).pairs(3),
];

struct Row {
    optimizer: Optimizer,
    memfit: Measured,
    pytorch: Option<Measured>,
    ratio: Option<Spread>,
    rate: f64,
    losses: Vec<f64>,
}

impl Row {
    /// The mean of the seeds.
    fn loss(&self) -> f64 {
        self.losses.iter().sum::<f64>() / self.losses.len() as f64
    }
}

/// What `--strategy` can name.
pub fn names() -> Vec<&'static str> {
    OPTIMIZERS.iter().map(|optimizer| optimizer.name).collect()
}

/// Measures them; PyTorch's fused AdamW beside them is the measure of time.
pub fn section(setup: &Setup, options: &Options) -> Result<String> {
    let shapes = vec![BLOCK; BLOCKS].join(",");
    let wanted = |name: &str| options.strategy.as_deref().is_none_or(|only| only == name);
    if wanted("adamw8bit") {
        setup.need("the row adamw8bit", "torchao", "torchao")?;
    }
    let mut anchor = setup.pytorch_optimizer("adamw", &shapes)?;
    let mut rows: Vec<Row> = Vec::new();
    for optimizer in OPTIMIZERS {
        // The first is measured in any case: the others' losses are shares of its.
        if rows.is_empty() || wanted(optimizer.name) {
            let row = row(setup, options, optimizer, &shapes, &mut anchor)?;
            eprintln!("{}", table::line(&row, rows.first()));
            rows.push(row);
        }
    }
    let steps = options.steps.unwrap_or(STEPS);
    Ok(table::page(&rows, count(&shapes), steps, SEEDS, options.pairs))
}

fn row(
    setup: &Setup,
    options: &Options,
    optimizer: Optimizer,
    shapes: &str,
    anchor: &mut super::side::Side,
) -> Result<Row> {
    let memfit = setup.memfit_optimizer(optimizer.name, shapes)?;
    let pytorch = optimizer.peer.map(|name| setup.pytorch_optimizer(name, shapes)).transpose()?;
    let pairs = options.pairs.min(optimizer.pairs);
    let (memfit, pytorch, ratio) = measure::in_turns(memfit, pytorch, anchor, 1, pairs)?;
    let (rate, losses) = setup.losses(optimizer.name, SEEDS, options.steps.unwrap_or(STEPS))?;
    Ok(Row { optimizer, memfit, pytorch, ratio, rate, losses })
}

/// Weights in all.
fn count(shapes: &str) -> f64 {
    let size = |shape: &str| shape.split('x').filter_map(|n| n.parse::<f64>().ok()).product::<f64>();
    shapes.split(',').map(size).sum()
}
