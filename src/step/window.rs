/// Where a window ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowRule {
    /// After so many micro-batches.
    Micros(usize),
    /// With the micro-batch that brings it to so many tokens.
    Tokens(u64),
}

/// How far training has come. Counts only what has returned from `step`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Updates made.
    pub steps: u64,
    /// Windows that ended, skipped ones too.
    pub windows: u64,
    /// Micro-batches run in ended windows.
    pub micro_batches: u64,
}

/// One micro-batch's place in its window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatch {
    /// From 0.
    pub index: usize,
    /// Whether the window ends with this one; `None` where only `flush` will tell.
    pub last: Option<bool>,
    /// Whether the window ends before its rule says so.
    pub short: bool,
    /// Micro-batches that the window will have, where known.
    pub of: Option<usize>,
    /// Position at the window's start.
    pub position: Position,
}

impl MicroBatch {
    /// Whether this is the window's first.
    pub fn first(&self) -> bool {
        self.index == 0
    }
}
