use crate::error::Error;

/// What becomes of records that cannot be used, and how many were passed over.
#[derive(Clone, Copy, Debug)]
pub(super) struct BadRecords {
    rule: Bad,
    rank: usize,
    world: usize,
    /// Of all epochs.
    passed_over: u64,
    /// Of this epoch.
    passed_over_here: u64,
    /// Of batches of which nothing was given yet.
    ahead: u64,
}

/// What becomes of a record that cannot be used.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bad {
    Tell,
    PassOver { most: u64 },
}

impl BadRecords {
    pub(super) fn new(rule: Bad, rank: usize, world: usize) -> Self {
        Self { rule, rank, world, passed_over: 0, passed_over_here: 0, ahead: 0 }
    }

    pub(super) fn passed_over(&self) -> u64 {
        self.passed_over
    }

    pub(super) fn begin_epoch(&mut self) {
        self.passed_over_here = 0;
    }

    /// Passes over a batch's bad records as long as that is allowed; the rest is to be told.
    pub(super) fn told_of(&mut self, bad: Vec<Error>) -> Vec<Error> {
        let Bad::PassOver { most } = self.rule else { return bad };
        let left = most.saturating_sub(self.passed_over_here + self.ahead);
        let passed = bad.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        for error in &bad[..passed] {
            tracing::warn!(%error, "a record was passed over");
        }
        self.ahead += passed as u64;
        bad.into_iter().skip(passed).collect()
    }

    /// The position goes on behind what was passed over: it counts.
    pub(super) fn settle(&mut self) {
        let ahead = std::mem::take(&mut self.ahead);
        self.passed_over += ahead;
        self.passed_over_here += ahead;
    }

    /// What was made ahead is gone, and will come again.
    pub(super) fn forget_ahead(&mut self) {
        self.ahead = 0;
    }

    /// What is told where nothing is left of a batch of so many records. One process alone goes on;
    /// where several train together, the others have a batch in this place.
    pub(super) fn nothing_left(&self, records: usize) -> Option<Error> {
        let Self { rank, world, .. } = *self;
        (world > 1 && records > 0).then_some(Error::EmptyBatch { records: records as u64, rank, world })
    }
}
