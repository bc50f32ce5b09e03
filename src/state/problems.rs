use tch::Kind;

use super::source::Found;

/// What is wrong with a saved tensor, if anything.
pub(super) fn misfit(
    name: &str,
    found: Option<Found<'_>>,
    size: &[i64],
    kind: Option<Kind>,
) -> Option<String> {
    match found {
        Some(Found::Tensor { size: saved, .. }) if saved != size => {
            Some(format!("`{name}` has shape {saved:?}, wanted {size:?}"))
        }
        Some(Found::Tensor { kind: saved, .. }) if kind.is_some_and(|kind| kind != saved) => {
            let wanted = kind.map_or_else(String::new, |kind| format!(", wanted {kind:?}"));
            Some(format!("`{name}` has dtype {saved:?}{wanted}"))
        }
        Some(Found::Tensor { .. }) => None,
        other => Some(wrong(name, other.is_some(), "a tensor")),
    }
}

pub(super) fn wrong(name: &str, there: bool, wanted: &str) -> String {
    if there { format!("`{name}` is not {wanted}") } else { format!("`{name}` is missing") }
}

/// Two long texts, from shortly before where they part.
pub(super) fn contrast(saved: &str, wanted: &str) -> (String, String) {
    let same = saved.chars().zip(wanted.chars()).take_while(|(a, b)| a == b).count();
    let cut = |text: &str| {
        let (from, shown) = (same.saturating_sub(24), 96);
        let before = if from > 0 { "…" } else { "" };
        let after = if text.chars().count() > from + shown { "…" } else { "" };
        let part: String = text.chars().skip(from).take(shown).collect();
        format!("{before}{part}{after}")
    };
    (cut(saved), cut(wanted))
}
