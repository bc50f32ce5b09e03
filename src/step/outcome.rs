use tch::Tensor;

/// What a call to `step` did.
#[must_use = "an outcome says whether the optimizer stepped"]
#[non_exhaustive]
#[derive(Debug)]
pub enum StepOutcome {
    /// The window is complete and the parameters moved.
    Stepped {
        /// The window's weighted mean loss: detached, 0-d, on the model's device.
        loss: Tensor,
        /// Gradient norm before clipping, unscaled; where a strategy measured it.
        grad_norm: Option<f64>,
        /// Learning rate of each parameter group.
        lr: Vec<f64>,
        /// Loss scale of this window; where a strategy scales.
        scale: Option<f64>,
        /// Rows or tokens of the window (its Σn); 1 where the loss has no weight.
        tokens: f64,
        /// Highest live bytes since the window began, on the model's device.
        peak: u64,
        /// How `step_batch` split the batch.
        split: Option<Split>,
    },
    /// The window is still open.
    Accumulating {
        /// Micro-batches done.
        done: usize,
        /// Micro-batches in the window, where known.
        of: Option<usize>,
    },
    /// The window is complete, the parameters did not move.
    Skipped {
        /// Why.
        reason: SkipReason,
        /// How `step_batch` split the batch.
        split: Option<Split>,
    },
}

/// How `step_batch` split a batch into micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Rows of the batch.
    pub batch: i64,
    /// Rows of each micro-batch; the last one may have fewer.
    pub rows: i64,
    /// Number of micro-batches.
    pub micro_batches: usize,
    /// How often the window began again before this split.
    pub retries: usize,
}

/// Why a step was skipped.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SkipReason {
    /// A gradient overflowed: the loss scale goes down.
    NonFiniteGradient {
        /// The scale that overflowed.
        scale: f64,
        /// The scale of the next window.
        next_scale: f64,
    },
    /// No micro-batch of the window had a row or token that counts: every weight was 0, as
    /// where all labels are ignored.
    NoTokens,
    /// A strategy of the user's decided so.
    Strategy(&'static str),
}

impl StepOutcome {
    /// Whether the parameters moved.
    pub fn stepped(&self) -> bool {
        matches!(self, Self::Stepped { .. })
    }

    pub(crate) fn with_split(mut self, by: Split) -> Self {
        if let Self::Stepped { split, .. } | Self::Skipped { split, .. } = &mut self {
            *split = Some(by);
        }
        self
    }

    /// How `step_batch` split the batch of this step, taken or skipped.
    pub fn split(&self) -> Option<Split> {
        match self {
            Self::Stepped { split, .. } | Self::Skipped { split, .. } => *split,
            Self::Accumulating { .. } => None,
        }
    }
}
