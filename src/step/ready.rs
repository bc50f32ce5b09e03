use super::phases::Update;
use super::window::MicroBatch;

/// What an optimizer does with gradients before the update, and so when the driver tells it
/// of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientUse {
    /// Nothing.
    AtUpdate,
    /// It wants to hear in which order they become final; they stay until the update.
    Announced,
    /// It moves a parameter as soon as its gradient is final, and drops the gradient.
    WhenFinal,
    /// It takes every micro-batch's gradient at once. The driver sees to it that a window's
    /// number of micro-batches is known when it begins and that all have one weight.
    EachMicroBatch,
}

impl GradientUse {
    /// Whether parameters, or state that cannot be put back, change during a backward.
    pub fn changes_in_backward(self) -> bool {
        matches!(self, Self::WhenFinal | Self::EachMicroBatch)
    }
}

/// A parameter whose gradient was added up in this backward.
///
/// It is told of on the thread that adds up, one parameter at a time, once per backward that
/// reaches the parameter, however often the parameter is used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ready {
    /// The parameter's group.
    pub group: usize,
    /// The parameter in its group.
    pub index: usize,
    /// The micro-batch. Its gradients are final where it is the window's last.
    pub micro: MicroBatch,
    /// What an update with this gradient is told. With [`GradientUse::EachMicroBatch`] the
    /// divisor counts the whole window's micro-batches from the first one on.
    pub update: Update,
}

/// What an optimizer did with a gradient it was told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// Nothing that matters after a failure.
    Noted,
    /// A parameter or its state changed: the window cannot be taken back.
    Changed,
}
