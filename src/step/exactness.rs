/// What a strategy promises against the oracle: the loop that a careful person writes by
/// hand in tch for the same split into micro-batches, weights, loss scale and autocast.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub enum Exactness {
    /// The same bits.
    Bitwise,
    /// The same real numbers, added up or multiplied in another order.
    SummationOrder,
    /// Within a relative tolerance.
    Approximate {
        /// Largest relative difference of a parameter after a step.
        tolerance: f64,
    },
}

impl Exactness {
    /// The weaker of two promises: what their combination keeps.
    pub fn and(self, other: Self) -> Self {
        if other > self { other } else { self }
    }
}

impl std::fmt::Display for Exactness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bitwise => f.write_str("bitwise"),
            Self::SummationOrder => f.write_str("summation order"),
            Self::Approximate { tolerance } => write!(f, "within {tolerance:e}"),
        }
    }
}
