//! The optimizers' measurements as text.

use super::Row;
use crate::peers::report::shown;

/// The whole section; `weights` were updated for the times, in so many pairs.
pub fn page(rows: &[Row], weights: f64, steps: usize, seeds: usize, pairs: usize) -> String {
    let first = rows.first();
    let mut text = format!(
        "\n## Optimizers\n\n\
         Bytes of state per weight and the time of one update, on {:.1} million weights of a \
         transformer of width 512 (median of {pairs} pairs, `Muon` of at most 3). `fused` is PyTorch's fused AdamW, `peer` PyTorch's own \
         implementation or, for `AdamW8bit`, torchao's. The loss is that of text kept apart, after \
         {steps} steps of the small model on this repository's own text, the mean of {seeds} seeds \
         with their range, each optimizer at the best rate of a grid (`examples/gpt/optimizer.rs`).\n\n\
         | optimizer | state B: memfit | peer | time / fused | time / peer | rate | loss | loss / `AdamW`'s |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- |\n",
        weights / 1e6
    );
    for row in rows {
        text += &cells(row, first, weights);
    }
    text + &short(rows, weights)
}

/// One row, for someone who waits.
pub fn line(row: &Row, first: Option<&Row>) -> String {
    let ratio = row.ratio.map_or(String::new(), |ratio| format!(", {} of the peer", shown(ratio)));
    let fused = shown(row.memfit.relative);
    let share = share(row, first);
    format!("{}: {fused} of fused AdamW{ratio}, loss {:.4} ({share:.4})", row.optimizer.name, row.loss())
}

fn cells(row: &Row, first: Option<&Row>, weights: f64) -> String {
    let bytes = |bytes: u64| format!("{:.3}", bytes as f64 / weights);
    let least = row.losses.iter().copied().fold(f64::INFINITY, f64::min);
    let most = row.losses.iter().copied().fold(0.0, f64::max);
    format!(
        "| {} | {} | {} | {} | {} | {:e} | {:.4} ({least:.4}–{most:.4}) | {:.4} |\n",
        row.optimizer.words,
        bytes(row.memfit.peak),
        row.pytorch.as_ref().map_or("none".to_owned(), |side| bytes(side.peak)),
        shown(row.memfit.relative),
        row.ratio.map_or("none".to_owned(), shown),
        row.rate,
        row.loss(),
        share(row, first),
    )
}

fn share(row: &Row, first: Option<&Row>) -> f64 {
    row.loss() / first.map_or(row.loss(), Row::loss)
}

/// The goals, and which are missed by how much.
fn short(rows: &[Row], weights: f64) -> String {
    let mut text = "\nGoals: fused AdamW at most 1.00 of PyTorch's time; `AdamW8bit` at most 0.25 of torchao's and \
                    5 of fused AdamW's, at most 2.1 B of state and a loss within 1 %; `AdamW` with bf16 moments, \
                    `Lion`, `Adafactor` and `Muon` within 3 %. "
        .to_owned();
    let missed: Vec<String> = rows.iter().flat_map(|row| missed(row, rows.first(), weights)).collect();
    if missed.is_empty() {
        return text + "All are met.\n";
    }
    text += "Not met:\n\n";
    missed.iter().for_each(|line| text += &format!("- {line}\n"));
    text
}

fn missed(row: &Row, first: Option<&Row>, weights: f64) -> Vec<String> {
    let goals = &row.optimizer.goals;
    let bytes = row.memfit.peak as f64 / weights;
    let figures = [
        ("bytes of state", bytes, Some(goals.bytes)),
        ("time over the peer's", row.ratio.map_or(f64::NAN, |ratio| ratio.median), goals.time),
        ("time over fused AdamW's", row.memfit.relative.median, goals.of_fused),
        ("loss over `AdamW`'s", share(row, first), goals.loss),
    ];
    let over = figures.into_iter().filter_map(|(what, found, goal)| Some((what, found, goal?)));
    over.filter(|(_, found, goal)| found.is_nan() || found > goal)
        .map(|(what, found, goal)| format!("{}: {what} {found:.3}, goal {goal}", row.optimizer.words))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::{OPTIMIZERS, Row};
    use super::*;
    use crate::peers::measure::Measured;

    #[test]
    fn a_goal_that_is_missed_is_named_with_both_numbers() {
        let row = |index: usize, bytes: u64, loss: f64| Row {
            optimizer: OPTIMIZERS[index],
            memfit: Measured { peak: bytes, ..Default::default() },
            pytorch: None,
            ratio: Some(Default::default()),
            rate: 1e-3,
            losses: vec![loss, loss],
        };
        let rows = [row(0, 80, 2.0), row(2, 22, 2.03)];
        let found = short(&rows, 10.0);
        assert!(found.contains("- `AdamW8bit`: bytes of state 2.200, goal 2.1\n"), "{found}");
        assert!(found.contains("- `AdamW8bit`: loss over `AdamW`'s 1.015, goal 1.01\n"), "{found}");
        assert!(short(&rows[..1], 10.0).ends_with("All are met.\n"));
        assert_eq!(super::super::count("4x5,3"), 23.0);
    }
}
