/// Where in a training step a strategy acts, outermost first.
///
/// The place is fixed per strategy, so the order of `.with` never matters.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Watches the whole step: budgets, reports.
    Watch,
    /// Reads the weights after an update: averages.
    Average,
    /// Says where a window ends and how a batch is split.
    Window,
    /// Puts things back after a failure.
    Recovery,
    /// Sets learning rates before an update.
    Schedule,
    /// Chooses the dtype of the arithmetic and the scale of the loss.
    Precision,
    /// Bounds the gradients.
    Clip,
    /// Keeps the weights that are updated apart from those that compute.
    Master,
    /// Decides where saved tensors live.
    Saved,
}

/// What a strategy says of another one at the same [`Place`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// Nothing: the two are refused.
    Unknown,
    /// Either order gives the same.
    Commutes,
    /// This one acts before (outside) the other.
    Before,
}
