use super::phases::Measure;
use super::strategy::{Conflict, Gradients, Strategy};

/// Why a strategy cannot work where parameters move in backward, if so.
pub(crate) fn needs_gradients(strategy: &dyn Strategy) -> Option<Conflict> {
    let why = if strategy.measures() != Measure::Nothing {
        "it measures all gradients before the first parameter moves, and parameters move while others' \
         gradients are not there yet"
    } else if strategy.gradients() != Gradients::InPlace {
        "it needs gradients after backward, and they are gone by then"
    } else if strategy.retries() {
        "a window in which parameters moved cannot run again"
    } else {
        return None;
    };
    Some(Conflict::new(
        why,
        "leave one of them out: an optimizer that updates after backward works beside it, with its state offloaded \
         where memory is short",
    ))
}
