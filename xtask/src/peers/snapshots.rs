//! The figures of the bench `snapshot` as a section.

use super::setup::Setup;
use crate::problem::{Problem, Result};

/// The least share of the disk's own speed.
const GOAL: f64 = 0.9;
/// How the bench prints a share.
const SHARE: &str = " of the plain speed";

/// Runs the bench.
pub fn section(setup: &Setup) -> Result<String> {
    let printed = setup.bench("snapshot")?;
    let text = text(&printed);
    match text.contains('|') {
        true => Ok(text),
        false => Err(Problem::new(format!("the bench `snapshot` printed no share: {printed}"))),
    }
}

fn text(printed: &str) -> String {
    let shares: Vec<(&str, &str)> = printed.lines().filter_map(share).collect();
    let others: Vec<&str> = printed.lines().filter(|line| share(line).is_none()).collect();
    let mut text = "\n## Snapshots\n\n\
        Saving and resuming AdamW's weights and moments, in turns with a plain sequential write (one \
        file, fsync at its end) and a plain read of as many bytes on the same disk.\n\n"
        .to_owned();
    if !shares.is_empty() {
        text += "| snapshot | speed / plain |\n| --- | --- |\n";
    }
    let mut missed = Vec::new();
    for (name, value) in &shares {
        text += &format!("| {name} | {value} |\n");
        let number = value.split_whitespace().next().and_then(|number| number.parse().ok());
        if number.is_none_or(|number: f64| number < GOAL) {
            missed.push(*name);
        }
    }
    text += "\n";
    others.iter().filter(|line| !line.trim().is_empty()).for_each(|line| text += &format!("- {line}\n"));
    let verdict =
        if missed.is_empty() { "Met.".to_owned() } else { format!("Not met: {}.", missed.join(", ")) };
    text + &format!("\nGoal: at least {GOAL} of the plain speed. {verdict}\n")
}

/// `save: 0.95 of the plain speed (median of 7)` as name and share.
fn share(line: &str) -> Option<(&str, &str)> {
    let (name, value) = line.split_once(": ")?;
    value.contains(SHARE).then_some((name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_below_the_goal_is_named() {
        let text = text(
            "400.0 MB\nsave: 0.95 of the plain speed (median of 7)\nresume: 0.80 of the plain speed (x)",
        );
        assert!(text.contains("| save | 0.95 of the plain speed (median of 7) |"), "{text}");
        assert!(text.contains("- 400.0 MB\n") && text.ends_with("Not met: resume.\n"), "{text}");
    }
}
