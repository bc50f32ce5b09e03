//! What is measured, by the names that both sides know.

/// Who has a strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Has {
    Both,
    Memfit,
}

#[derive(Clone, Copy, Debug)]
pub struct Strategy {
    pub name: &'static str,
    pub has: Has,
    /// Whether it is a row of the comparison, or only a candidate under a budget.
    pub compared: bool,
}

const fn compared(name: &'static str) -> Strategy {
    Strategy { name, has: Has::Both, compared: true }
}

const fn candidate(name: &'static str, has: Has) -> Strategy {
    Strategy { name, has, compared: false }
}

const COMPARED: [Strategy; 10] = [
    compared("plain"),
    compared("checkpoint:1"),
    compared("checkpoint:2"),
    compared("bf16"),
    compared("bf16+checkpoint:1"),
    compared("accumulate:4"),
    compared("accumulate:16"),
    compared("bf16+checkpoint:1+accumulate:4"),
    compared("in-backward"),
    compared("checkpoint:1+in-backward"),
];

const CANDIDATES: [Strategy; 14] = [
    candidate("bf16+checkpoint:2", Has::Both),
    candidate("bf16+accumulate:2", Has::Both),
    candidate("bf16+accumulate:4", Has::Both),
    candidate("bf16+accumulate:8", Has::Both),
    candidate("bf16+accumulate:16", Has::Both),
    candidate("bf16+checkpoint:1+accumulate:2", Has::Both),
    candidate("bf16+checkpoint:1+accumulate:16", Has::Both),
    candidate("checkpoint:1+accumulate:16", Has::Both),
    candidate("bf16+accumulate:4+disk-optimizer", Has::Memfit),
    candidate("bf16+accumulate:8+disk-optimizer", Has::Memfit),
    candidate("bf16+checkpoint:1+disk-optimizer", Has::Memfit),
    candidate("bf16+checkpoint:1+accumulate:2+disk-optimizer", Has::Memfit),
    candidate("bf16+checkpoint:1+accumulate:4+disk-optimizer", Has::Memfit),
    candidate("bf16+disk-activations+disk-optimizer", Has::Memfit),
];

/// Budgets are for the reference model; the small one's batch has four rows, so it cannot be
/// split into more.
pub fn of(model: &str) -> impl Iterator<Item = &'static Strategy> {
    let reference = model == "reference";
    let candidates = if reference { &CANDIDATES[..] } else { &[] };
    let fits = move |strategy: &&Strategy| reference || strategy.name != "accumulate:16";
    COMPARED.iter().chain(candidates).filter(fits)
}
