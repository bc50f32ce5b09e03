//! Strategies by name, the same names on both sides.

use std::path::Path;

use crate::gpt::{Amp, Failure, Plan, Recompute, Split, When};

/// One of each sort, for a run without a peer.
pub const EXAMPLES: [&str; 9] = [
    "plain",
    "checkpoint:1",
    "checkpoint:2",
    "bf16",
    "bf16+checkpoint:1+accumulate:4",
    "checkpoint:1+in-backward",
    "disk-activations",
    "disk-optimizer",
    "bf16+checkpoint:1+accumulate:4+disk-activations+disk-optimizer",
];

/// The strategies of parts joined by `+`; files go into `folder`.
///
/// # Errors
/// A part that has no such name.
pub fn plan(name: &str, folder: &Path) -> Result<Plan, Failure> {
    let mut plan = Plan::plain(3e-4);
    for part in name.split('+') {
        let (kind, number) = part.split_once(':').unwrap_or((part, "1"));
        let number = number.parse().map_err(|_| format!("`{part}` has no whole number"))?;
        match kind {
            "plain" => {}
            "bf16" => plan.amp = Amp::Bf16,
            "checkpoint" => plan.recompute = Recompute::Every(number),
            "accumulate" => plan.split = Split::Into(number),
            "in-backward" => plan.when = When::InBackward,
            "disk-activations" => plan.activations = Some(folder.to_owned()),
            "disk-optimizer" => plan.state = Some(folder.to_owned()),
            _ => return Err(format!("there is no strategy `{part}`").into()),
        }
    }
    Ok(plan)
}
