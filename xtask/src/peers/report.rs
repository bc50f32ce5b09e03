//! The measurements as a page.

use std::fmt::Write;

use super::Model;
use super::measure::{Measured, Row, Spread};
use super::setup::Setup;

const BUDGETS: [u64; 6] = [100, 130, 160, 200, 300, 450];
const MB: f64 = 1e6;

/// What was compared, and how.
pub fn head() -> &'static str {
    "# memfit and PyTorch, measured\n\n\
     Written by `cargo xtask peers`; do not edit. Both sides train the byte-level GPT of \
     `examples/gpt` from the same weights on the same rows with equal dropout masks, AdamW fused \
     on both. Peak bytes are those of libtorch's CPU allocator, counted on both sides by the same \
     code (`src/ffi/shim/allocator.cpp`) and the same from run to run. Times are ratios: the \
     median of interleaved pairs, with their range; one side idles while the other runs, both \
     with 2 threads.\n"
}

/// On what a section was measured: sections may come from several runs.
pub fn machine(setup: &Setup) -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!(
        "Machine: {cores} cores, {}, {}. PyTorch {}; memfit {} on the same libtorch.\n",
        processor(),
        std::env::consts::ARCH,
        setup.pytorch_version,
        manifest_version(),
    )
}

/// The tables of one model.
pub fn model(model: &Model, rows: &[Row], pairs: usize) -> String {
    let mut text = format!("\n## The {} model\n\n", model.name);
    text += "| strategy | peak MB: PyTorch | memfit | ratio | time: memfit / PyTorch | loss: PyTorch | memfit | largest difference |\n";
    text += "| --- | --- | --- | --- | --- | --- | --- | --- |\n";
    for row in rows.iter().filter(|row| row.strategy.compared) {
        text += &compared(row);
    }
    let steps = rows.first().map_or(0, |row| row.memfit.losses.len());
    let _ = writeln!(
        text,
        "\nTimes are of {pairs} pairs. Losses are those of step {steps}; the difference is the largest of all steps."
    );
    text += &short(model, rows);
    if rows.iter().any(|row| !row.strategy.compared) {
        text += &budgets(rows);
    }
    text
}

/// One row, for someone who waits.
pub fn line(row: &Row) -> String {
    let ratio = row.ratio.map_or(String::new(), |ratio| format!(", time {}", shown(ratio)));
    let pytorch = row.pytorch.as_ref();
    let theirs = pytorch.map_or(String::new(), |side| format!(" of PyTorch's {:.1}", side.peak as f64 / MB));
    let name = row.strategy.name;
    let relative = row.memfit.relative.median;
    format!(
        "{name}: peak {:.1}{theirs} MB{ratio}, {relative:.2} of PyTorch's plain",
        row.memfit.peak as f64 / MB
    )
}

fn compared(row: &Row) -> String {
    let Some((pytorch, ratio)) = row.pytorch.as_ref().zip(row.ratio) else { return String::new() };
    let loss = |side: &Measured| side.losses.last().copied().unwrap_or(f64::NAN);
    format!(
        "| {} | {:.2} | {:.2} | {:.4} | {} | {:.6} | {:.6} | {:.1e} |\n",
        words(row.strategy.name),
        pytorch.peak as f64 / MB,
        row.memfit.peak as f64 / MB,
        row.memfit.peak as f64 / pytorch.peak as f64,
        shown(ratio),
        loss(pytorch),
        loss(&row.memfit),
        difference(&row.memfit, pytorch),
    )
}

/// The largest difference of two sides' losses at one step.
fn difference(memfit: &Measured, pytorch: &Measured) -> f64 {
    let pairs = memfit.losses.iter().zip(&pytorch.losses);
    pairs.map(|(ours, theirs)| (ours - theirs).abs()).fold(0.0, f64::max)
}

/// Which goals a model's rows miss, and by how much.
fn short(model: &Model, rows: &[Row]) -> String {
    let mut missed = Vec::new();
    for row in rows.iter().filter(|row| row.strategy.compared) {
        let Some((pytorch, ratio)) = row.pytorch.as_ref().zip(row.ratio) else { continue };
        let name = words(row.strategy.name);
        let (peak, time) = (row.memfit.peak as f64 / pytorch.peak as f64, time_goal(model, row));
        let tolerance = if row.strategy.name.contains("bf16") { 1e-2 } else { 1e-5 };
        let difference = difference(&row.memfit, pytorch);
        if peak > 1.001 {
            missed.push(format!("{name}: peak {peak:.4}, goal 1.001"));
        }
        if time.is_some_and(|goal| ratio.median > goal) {
            missed.push(format!("{name}: time {:.2}, goal {:.2}", ratio.median, time.unwrap_or_default()));
        }
        if difference.is_nan() || difference > tolerance {
            missed.push(format!("{name}: losses differ by {difference:.1e}, goal {tolerance:.0e}"));
        }
    }
    let goals = if model.name == "small" { "0.92 plain and 0.80 checkpointed" } else { "1.02" };
    let mut text = format!("Goals: peak 1.001, time {goals}, losses 1e-5 (bf16 1e-2). ");
    if missed.is_empty() {
        return text + "All are met.\n";
    }
    text += "Not met:\n\n";
    missed.iter().for_each(|line| text += &format!("- {line}\n"));
    text
}

fn time_goal(model: &Model, row: &Row) -> Option<f64> {
    match (model.name, row.strategy.name) {
        ("small", "plain") => Some(0.92),
        ("small", name) if name.contains("checkpoint") => Some(0.80),
        ("small", _) => None,
        _ => Some(1.02),
    }
}

/// The fastest configuration of each side under each budget.
fn budgets(rows: &[Row]) -> String {
    let mut text =
        "\n### The fastest configuration under a budget\n\nTime is over that of PyTorch's plain loop.\n\n\
                    | budget MB | PyTorch | peak MB | time | memfit | peak MB | time |\n\
                    | --- | --- | --- | --- | --- | --- | --- |\n"
            .to_owned();
    for budget in BUDGETS {
        let theirs = rows.iter().filter_map(|row| Some((row.strategy.name, row.pytorch.as_ref()?)));
        let ours = rows.iter().map(|row| (row.strategy.name, &row.memfit));
        let (theirs, ours) = (fastest(theirs, budget), fastest(ours, budget));
        let _ = writeln!(text, "| {budget} | {theirs} | {ours} |");
    }
    text += "\n### Every configuration\n\n| configuration | PyTorch peak MB | time | memfit peak MB | time |\n\
             | --- | --- | --- | --- | --- |\n";
    for row in rows {
        let cells = |side: &Measured| format!("{:.1} | {:.2}", side.peak as f64 / MB, side.relative.median);
        let theirs = row.pytorch.as_ref().map_or("none | ".to_owned(), cells);
        let _ = writeln!(text, "| {} | {theirs} | {} |", words(row.strategy.name), cells(&row.memfit));
    }
    text
}

fn fastest<'a>(sides: impl Iterator<Item = (&'a str, &'a Measured)>, budget: u64) -> String {
    let fits = sides.filter(|(_, side)| side.peak <= budget * 1_000_000);
    let fastest = fits.min_by(|(_, one), (_, other)| one.relative.median.total_cmp(&other.relative.median));
    fastest.map_or("none | | ".to_owned(), |(name, side)| {
        format!("{} | {:.1} | {:.2}", words(name), side.peak as f64 / MB, side.relative.median)
    })
}

pub fn shown(spread: Spread) -> String {
    format!("{:.2} ({:.2}–{:.2})", spread.median, spread.least, spread.most)
}

/// `bf16+checkpoint:2` as a reader says it.
fn words(name: &str) -> String {
    let part = |part: &str| match part.split_once(':') {
        Some(("checkpoint", "1")) => "checkpoint every block".to_owned(),
        Some(("checkpoint", "2")) => "checkpoint every 2nd block".to_owned(),
        Some((kind, number)) => format!("{kind} {number}"),
        None => part
            .replace("disk-optimizer", "optimizer on disk")
            .replace("disk-activations", "activations on disk")
            .replace("in-backward", "update in backward"),
    };
    name.split('+').map(part).collect::<Vec<_>>().join(" + ")
}

fn processor() -> String {
    let about = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = about.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or("a processor without a name".to_owned(), |(_, name)| name.trim().to_owned())
}

fn manifest_version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_as_words() {
        assert_eq!(words("plain"), "plain");
        assert_eq!(
            words("bf16+checkpoint:1+accumulate:4+disk-optimizer"),
            "bf16 + checkpoint every block + accumulate 4 + optimizer on disk"
        );
    }

    #[test]
    fn the_fastest_that_fits_wins() {
        let side = |peak, median| {
            let mut side = Measured { peak, ..Default::default() };
            side.relative.median = median;
            side
        };
        let (big, slow, quick) = (side(400_000_000, 0.5), side(90_000_000, 2.0), side(99_000_000, 1.5));
        let sides = || [("big", &big), ("slow", &slow), ("quick", &quick)].into_iter();
        assert_eq!(fastest(sides(), 100), "quick | 99.0 | 1.50");
        assert_eq!(fastest(sides(), 50), "none | | ");
        assert_eq!(fastest(sides(), 450), "big | 400.0 | 0.50");
    }
}
