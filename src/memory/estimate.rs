use std::fmt::{self, Display, Formatter};

use tch::{Device, Kind};

use super::extrapolate::How;
use super::phase::Phase;
use super::role::RoleBytes;
use super::summary::name;
use super::tables::{amount, shown};

/// What a training step will take, told before the first one; from
/// [`Stack::estimate`](crate::Stack::estimate). `Display` writes it as a table.
///
/// Weights, buffers, gradients, master weights and optimizer state are counted from the tensors
/// themselves, activations and the peak are measured on a few rows and continued to all of them.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// The device that trains.
    pub device: Device,
    /// Rows of a micro-batch that this is for.
    pub rows: i64,
    /// The model's parameters, frozen ones too, by dtype.
    pub parameters: Vec<Held>,
    /// The model's buffers, by dtype.
    pub buffers: Vec<Held>,
    /// Copies of weights that the optimizer moves in place of the model's.
    pub master_weights: Vec<Held>,
    /// Moments and whatever else the optimizer keeps; empty where it hides it.
    pub optimizer_state: Vec<Held>,
    /// Whether the optimizer hides its state (tch's own does): then it is in no figure here.
    pub hidden_state: bool,
    /// One gradient per trained parameter, as backward makes them.
    pub gradients: Vec<Held>,
    /// Sums and copies of gradients that strategies keep through a window.
    pub gradient_sums: u64,
    /// What is kept of gradients between a window's micro-batches and until its update: the
    /// gradients, the sums in their place, or nothing.
    pub kept_gradients: u64,
    /// What forward leaves for backward.
    pub activations: Activations,
    /// Live bytes on the device when this was made: all of the above that is there already, the
    /// batch, whatever else the program holds.
    pub live: u64,
    /// The highest live bytes of a step.
    pub peak: u64,
    /// The phase in which the peak falls.
    pub phase: Phase,
    /// The segment in which the peak falls, if one was named.
    pub segment: Option<String>,
    /// Who holds the peak's bytes, where that was recorded.
    pub roles: Option<RoleBytes>,
    /// How the peak was found.
    pub how: How,
}

/// Bytes of one dtype in one place.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The dtype.
    pub kind: Kind,
    /// Where they are.
    pub home: Home,
    /// How many.
    pub bytes: u64,
}

/// Where bytes are between steps.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    /// In memory, counted on this device.
    Memory(Device),
    /// With an offload: on disk, or in pinned host memory.
    Away,
}

/// Bytes that forward leaves for backward: `fixed + rows × per_row`.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activations {
    /// Whatever the rows, as a cast of the weights; below 0 where the first row takes less.
    pub fixed: i64,
    /// For each row.
    pub per_row: i64,
    /// Of all rows.
    pub bytes: u64,
}

/// How far an estimate was off: its peak against that of the first step taken after it.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EstimateError {
    /// The peak that was predicted.
    pub predicted: u64,
    /// The peak that was measured.
    pub measured: u64,
}

impl Held {
    /// Adds bytes to those of the same dtype and place.
    pub(crate) fn add(list: &mut Vec<Self>, kind: Kind, home: Home, bytes: u64) {
        match list.iter_mut().find(|held| (held.kind, held.home) == (kind, home)) {
            Some(held) => held.bytes += bytes,
            None => list.push(Self { kind, home, bytes }),
        }
    }

    /// The bytes of all.
    pub fn total(list: &[Self]) -> u64 {
        list.iter().map(|held| held.bytes).sum()
    }
}

impl Activations {
    pub(crate) fn new(rows: i64, fixed: i64, per_row: i64) -> Self {
        let bytes = fixed.saturating_add(per_row.saturating_mul(rows)).max(0) as u64;
        Self { fixed, per_row, bytes }
    }
}

impl Estimate {
    /// What is there between steps, in memory or away: parameters, buffers, master weights and
    /// optimizer state.
    pub fn standing(&self) -> u64 {
        [&self.parameters, &self.buffers, &self.master_weights, &self.optimizer_state]
            .map(|list| Held::total(list))
            .iter()
            .sum()
    }

    /// What training keeps whatever the batch: [`Estimate::standing`] and the gradients that
    /// wait for the update.
    pub fn states(&self) -> u64 {
        self.standing() + self.kept_gradients
    }
}

impl EstimateError {
    pub(crate) fn new(predicted: u64, measured: u64) -> Self {
        Self { predicted, measured }
    }

    /// Predicted above measured, in percent of measured; below 0 where too little was predicted.
    pub fn percent(&self) -> f64 {
        (self.predicted as f64 - self.measured as f64) / self.measured.max(1) as f64 * 100.0
    }
}

impl Display for EstimateError {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (predicted, measured) = (amount(self.predicted), amount(self.measured));
        write!(f, "peak predicted {predicted}, measured {measured}: {:+.1} %", self.percent())
    }
}

impl Display for Estimate {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let device = name(self.device);
        writeln!(f, "estimate of a step with micro-batches of {} rows on {device}", self.rows)?;
        for (what, list) in [
            ("parameters", &self.parameters),
            ("buffers", &self.buffers),
            ("master weights", &self.master_weights),
            ("optimizer state", &self.optimizer_state),
            ("gradients", &self.gradients),
        ] {
            list.iter().filter(|held| held.bytes > 0).try_for_each(|held| {
                let home = match held.home {
                    Home::Memory(device) if device == self.device => "",
                    Home::Memory(_) => ", in host memory",
                    Home::Away => ", offloaded",
                };
                row(f, what, held.bytes, &format!("{:?}{home}", held.kind))
            })?;
        }
        if self.hidden_state {
            writeln!(f, "{:<18}{:>12}  this optimizer hides it", "optimizer state", "not known")?;
        }
        if self.gradient_sums > 0 {
            row(f, "gradient sums", self.gradient_sums, "kept by strategies through a window")?;
        }
        let Activations { fixed, per_row, bytes } = self.activations;
        let (each, more) = (amount(per_row.unsigned_abs()), amount(fixed.unsigned_abs()));
        let each = format!("{} rows × {}{each} {} {more}", self.rows, minus(per_row), sign(fixed));
        row(f, "activations", bytes, &each)?;
        row(f, "live now", self.live, "all that is in memory already")?;
        let segment = self.segment.as_ref().map(|name| format!(", segment {}", shown(name)));
        let place = format!("in {}{}; {}", self.phase.name(), segment.unwrap_or_default(), self.how);
        row(f, "predicted peak", self.peak, &place)?;
        if let Some(roles) = &self.roles {
            for (role, bytes) in roles.iter().filter(|(_, bytes)| *bytes > 0) {
                row(f, &format!("  {}", role.name()), bytes, "")?;
            }
        }
        Ok(())
    }
}

fn row(f: &mut Formatter<'_>, name: &str, bytes: u64, remark: &str) -> fmt::Result {
    let line = format!("{name:<18}{:>12}  {remark}", amount(bytes));
    writeln!(f, "{}", line.trim_end())
}

fn minus(number: i64) -> &'static str {
    if number < 0 { "−" } else { "" }
}

fn sign(number: i64) -> char {
    if number < 0 { '−' } else { '+' }
}
