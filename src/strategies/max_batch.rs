//! The largest size that fits, found by running it.
//!
//! *Cost*: about 2·log₂(largest size) runs of the closure, half of which fail.
//!
//! *When it acts*: once, before training. It doubles from the start until a size fails (or
//! halves until one runs), then bisects, so the answer is exact where larger sizes need more;
//! then it takes the margin off. The size it gives has itself run.
//!
//! *Limits*: only running out of memory counts as too large; any other error is returned.
//! [`find_max_batch`] puts libtorch's generators back and knows no model;
//! [`Stack::find_max_batch`](crate::Stack::find_max_batch) puts everything back. The size is a
//! number to the closure: rows, a sequence's length, a number of samples. What lives beside the closure
//! lives beside the search, too; a [`Loader`](crate::data::Loader) that is not begun has no batches yet, so search under a limit
//! from which (prefetch + 1) of its batches are taken off.
//!
//! ```
//! use memfit::{find_max_batch, memory::{self, Limit}};
//! use memfit::tch::{Device, Kind, Tensor};
//!
//! let _limit = Limit::new(memory::stats(Device::Cpu)?.current + 13 * 4096)?;
//! let found = find_max_batch(1..=64, |rows| {
//!     Tensor::f_zeros([rows, 1024], (Kind::Float, Device::Cpu))?;
//!     Ok(())
//! })?;
//! assert_eq!(found.size, 13);
//! # Ok::<(), memfit::Error>(())
//! ```

use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::Device;

use crate::error::{Error, Result};
use crate::memory::{self, PeakScope};
use crate::rng::Generators;

/// How to search.
#[derive(Clone, Debug)]
pub struct Search {
    range: RangeInclusive<i64>,
    start: i64,
    margin: f64,
    device: Device,
}

/// What a search found.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The size to use: the largest one, less the margin. It has itself run.
    pub size: i64,
    /// The largest size that ran.
    pub largest: i64,
    /// Every size that was tried, in order.
    pub trials: Vec<Trial>,
}

/// One size that was tried.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trial {
    /// The size.
    pub size: i64,
    /// Whether it ran.
    pub ran: bool,
    /// Highest live bytes meanwhile.
    pub peak: u64,
}

impl Search {
    /// Within a range, from its low end.
    pub fn new(range: RangeInclusive<i64>) -> Self {
        let start = *range.start();
        Self { range, start, margin: 0.0, device: Device::Cpu }
    }

    /// From another size.
    pub fn start(mut self, size: i64) -> Self {
        self.start = size;
        self
    }

    /// Leaves a share of the largest size free, from 0 up to 1: for an accelerator whose memory
    /// gets fragmented while training goes on.
    pub fn margin(mut self, share: f64) -> Self {
        self.margin = share;
        self
    }

    /// On another device than the CPU.
    pub fn on(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    fn check(&self) -> Result<()> {
        let (low, high) = (*self.range.start(), *self.range.end());
        let problem = match () {
            () if low < 1 => format!("sizes begin at 1, not at {low}"),
            () if high < low => format!("the range {low}..={high} is empty"),
            () if !self.range.contains(&self.start) => {
                format!("the start {} is outside {low}..={high}", self.start)
            }
            () if !(0.0..1.0).contains(&self.margin) => {
                format!("a margin is from 0 up to 1, not {}", self.margin)
            }
            () => return Ok(()),
        };
        Err(Error::config("find_max_batch", problem))
    }

    /// Runs the search; the closure leaves everything as it was.
    pub(crate) fn run(&self, mut body: impl FnMut(i64) -> Result<()>) -> Result<Found> {
        self.check()?;
        let mut trials = Trials { device: self.device, done: Vec::new(), last: None, body: &mut body };
        let (mut ran, mut failed) = self.bracket(&mut trials)?;
        while failed - ran > 1 {
            let middle = ran + (failed - ran) / 2;
            if trials.fits(middle)? {
                ran = middle;
            } else {
                failed = middle;
            }
        }
        let wanted = (ran as f64 * (1.0 - self.margin)).floor() as i64;
        let mut size = wanted.clamp(*self.range.start(), ran);
        while !trials.fits(size)? {
            size = self.below(size, &mut trials)?;
        }
        Ok(Found { size, largest: ran, trials: trials.done })
    }

    /// A size that ran and a larger one that did not, or one past the range.
    fn bracket(&self, trials: &mut Trials<'_>) -> Result<(i64, i64)> {
        let high = *self.range.end();
        let mut size = self.start;
        if trials.fits(size)? {
            while size < high {
                let larger = size.saturating_mul(2).min(high);
                if !trials.fits(larger)? {
                    return Ok((size, larger));
                }
                size = larger;
            }
            return Ok((size, high.saturating_add(1)));
        }
        loop {
            let smaller = self.below(size, trials)?;
            if trials.fits(smaller)? {
                return Ok((smaller, size));
            }
            size = smaller;
        }
    }

    /// Half of a size that failed; where the range ends, its error.
    fn below(&self, size: i64, trials: &mut Trials<'_>) -> Result<i64> {
        let low = *self.range.start();
        match trials.last.take() {
            Some(error) if size == low => Err(error),
            _ => Ok((size / 2).max(low)),
        }
    }
}

impl From<RangeInclusive<i64>> for Search {
    fn from(range: RangeInclusive<i64>) -> Self {
        Self::new(range)
    }
}

struct Trials<'a> {
    device: Device,
    done: Vec<Trial>,
    /// The last failure.
    last: Option<Error>,
    body: &'a mut dyn FnMut(i64) -> Result<()>,
}

impl Trials<'_> {
    fn fits(&mut self, size: i64) -> Result<bool> {
        if self.done.iter().any(|trial| trial.size == size && trial.ran) {
            return Ok(true);
        }
        let scope = PeakScope::new(self.device)?;
        let ran = match (self.body)(size) {
            Ok(()) => true,
            Err(error) if error.is_out_of_memory() => {
                memory::release_caches(self.device)?;
                self.last = Some(error);
                false
            }
            Err(error) => return Err(error),
        };
        self.done.push(Trial { size, ran, peak: scope.peak() });
        Ok(ran)
    }
}

/// Finds the largest size that a closure runs with; see the [module](self). Generators are put
/// back after each run; what else the closure changes is its own.
///
/// # Errors
/// [`Error::Config`] for an empty range, sizes below 1, a start outside the range or a bad
/// margin; out of memory where the smallest size does not fit; any other error of the closure.
pub fn find_max_batch(search: impl Into<Search>, mut body: impl FnMut(i64) -> Result<()>) -> Result<Found> {
    let search = search.into();
    let generators = Generators::capture(search.device)?;
    search.run(|size| {
        let ran = catch_unwind(AssertUnwindSafe(|| body(size)))
            .unwrap_or_else(|payload| Err(Error::from_panic(payload, "find_max_batch")));
        generators.restore()?;
        ran
    })
}
