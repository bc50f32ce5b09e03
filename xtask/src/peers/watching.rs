//! The figures of the bench `watching` as a section.

use super::setup::Setup;
use crate::problem::{Problem, Result};

/// The most that a timeline may take of a step's time.
const GOAL: f64 = 1.01;
/// How the bench prints a ratio.
const RATIO: &str = " of the time without";

/// Runs the bench.
pub fn section(setup: &Setup) -> Result<String> {
    let printed = setup.bench("watching")?;
    let text = text(&printed);
    match text.contains('|') {
        true => Ok(text),
        false => Err(Problem::new(format!("the bench `watching` printed no ratio: {printed}"))),
    }
}

fn text(printed: &str) -> String {
    let mut text = "\n## What seeing costs\n\n\
        A step with memory watched over the same step without, in turns.\n\n\
        | model | what is on | time / without |\n| --- | --- | --- |\n"
        .to_owned();
    let mut missed = Vec::new();
    let mut found = false;
    for (model, watch, value) in printed.lines().filter_map(ratio) {
        found = true;
        text += &format!("| {model} | {watch} | {value} |\n");
        let number = value.split_whitespace().next().and_then(|number| number.parse().ok());
        if watch == "`MemoryTimeline`" && number.is_none_or(|number: f64| number > GOAL) {
            missed.push(format!("{model} {value}"));
        }
    }
    if !found {
        return String::new();
    }
    text += "\n";
    let others = printed.lines().filter(|line| ratio(line).is_none() && !line.trim().is_empty());
    others.for_each(|line| text += &format!("- {line}\n"));
    let verdict =
        if missed.is_empty() { "Met.".to_owned() } else { format!("Not met: {}.", missed.join(", ")) };
    text + &format!("\nGoal: `MemoryTimeline` at most {GOAL}. {verdict}\n")
}

/// `small, `MemoryTimeline`: 1.004 (0.99–1.01) of the time without` as model, watch and ratio.
fn ratio(line: &str) -> Option<(&str, &str, &str)> {
    let (name, value) = line.split_once(": ")?;
    let (model, watch) = name.split_once(", ")?;
    Some((model, watch, value.strip_suffix(RATIO)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeline_that_takes_too_long_is_named() {
        let printed = "small, `MemoryTimeline`: 1.020 (1.01–1.03) of the time without\n\
            small, `Profiler`: 1.900 (1.80–2.00) of the time without\na step takes 8 ms\n";
        let text = text(printed);
        assert!(text.contains("| small | `Profiler` | 1.900 (1.80–2.00) |"), "{text}");
        assert!(text.contains("- a step takes 8 ms\n"), "{text}");
        assert!(text.ends_with("Not met: small 1.020 (1.01–1.03).\n"), "{text}");
        assert_eq!(super::text("nothing"), "");
    }
}
