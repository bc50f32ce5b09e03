//! Which activations of a chain are kept: the decision, as a value.

use std::fmt::Debug;
use std::ops::Range;

use crate::error::{Error, Result};

/// What happens to a stretch of a chain. Plans in a row cover a chain from its first segment
/// to its last.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// These segments keep what they save.
    Keep(Range<usize>),
    /// These segments keep nothing and are recomputed as one, from the range's input. The
    /// recompute follows a decision of its own, which covers the range.
    Recompute {
        /// The segments.
        range: Range<usize>,
        /// What their recompute keeps.
        inner: Vec<Plan>,
    },
    /// As the plan inside, with the range's input handed to the chain's offload link.
    OffloadInput(Box<Plan>),
    /// One segment that keeps the outputs of chosen operators and recomputes the rest.
    /// Reserved: no executor runs it yet.
    KeepOperators {
        /// The segment.
        segment: usize,
        /// Names of operators, as in `aten::mm`.
        operators: Vec<String>,
    },
}

impl Plan {
    /// Recomputes a range as one.
    pub fn recompute(range: Range<usize>) -> Self {
        Self::Recompute { inner: vec![Self::Keep(range.clone())], range }
    }

    /// The segments it covers.
    pub fn range(&self) -> Range<usize> {
        match self {
            Self::Keep(range) | Self::Recompute { range, .. } => range.clone(),
            Self::OffloadInput(plan) => plan.range(),
            Self::KeepOperators { segment, .. } => *segment..*segment + 1,
        }
    }

    /// The same decision for a stretch that begins `by` segments later.
    fn shifted(self, by: usize) -> Self {
        let shift = |range: Range<usize>| range.start + by..range.end + by;
        match self {
            Self::Keep(range) => Self::Keep(shift(range)),
            Self::Recompute { range, inner } => Self::Recompute {
                range: shift(range),
                inner: inner.into_iter().map(|plan| plan.shifted(by)).collect(),
            },
            Self::OffloadInput(plan) => Self::OffloadInput(Box::new(plan.shifted(by))),
            Self::KeepOperators { segment, operators } => {
                Self::KeepOperators { segment: segment + by, operators }
            }
        }
    }
}

/// Checks that plans in a row cover a range, each part once.
pub(super) fn check_cover(plans: &[Plan], range: Range<usize>) -> Result<()> {
    let mut next = range.start;
    for plan in plans {
        let part = plan.range();
        if part.start != next || part.end < part.start {
            let problem = format!("{part:?} follows segment {next}: each segment is planned once, in order");
            return Err(Error::config("Plan", problem));
        }
        let (offloads, plan) = match plan {
            Plan::OffloadInput(plan) => (true, plan.as_ref()),
            plan => (false, plan),
        };
        if offloads && !matches!(plan, Plan::Recompute { .. }) {
            let problem = "OffloadInput wants a range that is recomputed";
            return Err(Error::config("Plan", problem));
        }
        if let Plan::Recompute { inner, range } = plan {
            if inner.iter().any(|plan| matches!(plan, Plan::OffloadInput(_))) {
                let problem =
                    "OffloadInput stands at the top of a decision: inside a recompute inputs are kept";
                return Err(Error::config("Plan", problem));
            }
            check_cover(inner, range.clone())?;
        }
        next = part.end;
    }
    if next != range.end {
        return Err(Error::config("Plan", format!("it covers {next} of {} segments", range.end)));
    }
    Ok(())
}

/// Decides what the forward pass of a chain keeps.
pub trait Checkpointer: Debug {
    /// The decision for a chain of so many segments, each planned once, in order.
    ///
    /// # Errors
    /// Where no decision exists.
    fn decide(&self, segments: usize) -> Result<Vec<Plan>>;
}

impl<C: Checkpointer + ?Sized> Checkpointer for Box<C> {
    fn decide(&self, segments: usize) -> Result<Vec<Plan>> {
        (**self).decide(segments)
    }
}

/// Keeps all activations.
#[derive(Clone, Copy, Debug, Default)]
pub struct KeepAll;

impl Checkpointer for KeepAll {
    fn decide(&self, segments: usize) -> Result<Vec<Plan>> {
        Ok(vec![Plan::Keep(0..segments)])
    }
}

/// Recomputes each segment on its own: bytes: Σ segment inputs + one segment's activations.
#[derive(Clone, Copy, Debug, Default)]
pub struct RecomputeAll;

impl Checkpointer for RecomputeAll {
    fn decide(&self, segments: usize) -> Result<Vec<Plan>> {
        Ok((0..segments).map(|segment| Plan::recompute(segment..segment + 1)).collect())
    }
}

/// Recomputes the first segment, the n-th after it, and so on; keeps the others.
#[derive(Clone, Copy, Debug)]
pub struct EveryNth {
    n: usize,
}

impl EveryNth {
    /// Recomputes one in `n`.
    ///
    /// # Errors
    /// `n` is 0.
    pub fn new(n: usize) -> Result<Self> {
        if n == 0 {
            return Err(Error::config("EveryNth", "n must be at least 1"));
        }
        Ok(Self { n })
    }
}

impl Checkpointer for EveryNth {
    fn decide(&self, segments: usize) -> Result<Vec<Plan>> {
        let plan = |segment: usize| {
            let range = segment..segment + 1;
            if segment.is_multiple_of(self.n) { Plan::recompute(range) } else { Plan::Keep(range) }
        };
        Ok((0..segments).map(plan).collect())
    }
}

/// Splits the chain into ranges as even as can be and recomputes each as one: 9 segments in 5
/// ranges are 2, 2, 2, 2, 1.
///
/// Bytes: one input per range + the activations of the longest range; with
/// [`Ranges::nested`], of what the inner decision leaves of it.
#[derive(Debug)]
pub struct Ranges {
    count: usize,
    inner: Box<dyn Checkpointer>,
}

impl Ranges {
    /// So many ranges; a chain with fewer segments gets one range for each.
    ///
    /// # Errors
    /// `count` is 0.
    pub fn new(count: usize) -> Result<Self> {
        if count == 0 {
            return Err(Error::config("Ranges", "a chain is split into at least 1 range"));
        }
        Ok(Self { count, inner: Box::new(KeepAll) })
    }

    /// What the recompute of each range keeps.
    pub fn nested(mut self, inner: impl Checkpointer + 'static) -> Self {
        self.inner = Box::new(inner);
        self
    }
}

impl Checkpointer for Ranges {
    fn decide(&self, segments: usize) -> Result<Vec<Plan>> {
        let count = self.count.min(segments);
        let mut start = 0;
        (0..count)
            .map(|index| {
                let size = segments / count + usize::from(index < segments % count);
                let range = start..start + size;
                start = range.end;
                let inner = self.inner.decide(size)?;
                Ok(Plan::Recompute {
                    inner: inner.into_iter().map(|plan| plan.shifted(range.start)).collect(),
                    range,
                })
            })
            .collect()
    }
}

/// Halves the chain again and again down to single segments: bytes grow with the logarithm of
/// the number of segments, and so does the number of times that each is recomputed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Halves;

impl Checkpointer for Halves {
    fn decide(&self, segments: usize) -> Result<Vec<Plan>> {
        Ok(halves(0..segments))
    }
}

fn halves(range: Range<usize>) -> Vec<Plan> {
    if range.len() < 2 {
        return range.map(|segment| Plan::recompute(segment..segment + 1)).collect();
    }
    let middle = range.start + range.len().div_ceil(2);
    [range.start..middle, middle..range.end]
        .map(|half| {
            if half.len() == 1 {
                Plan::recompute(half)
            } else {
                Plan::Recompute { inner: halves(half.clone()), range: half }
            }
        })
        .into()
}
