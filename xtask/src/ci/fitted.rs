//! `char_gpt --micro-batch auto` finds the micro-batch that the reference workload has room for.

use super::Context;
use crate::problem::{Problem, Result};

const RUN: [&str; 8] = ["--micro-batch", "auto", "--dropout", "0", "--steps", "1", "--no-table", "--seed=1"];
/// Attention holds some bytes for each thread.
const THREADS: &str = "2";
const FOUND: &str = "16 rows now run as 4 micro-batches of 4";

pub fn run(context: &Context) -> Result<()> {
    println!("-- example char_gpt, in the micro-batches that fit");
    let cargo = context.cargo_with_features(&["run", "--quiet", "--example", "char_gpt", "--"]);
    let printed = cargo.env("OMP_NUM_THREADS", THREADS).args(RUN).output()?;
    if [FOUND, "within 270.0 MB", "wrote the chart: "].iter().all(|text| printed.contains(text)) {
        return Ok(());
    }
    Err(Problem::new(format!(
        "char_gpt did not find that {FOUND} within 270 MB, or wrote no chart:\n{printed}"
    )))
}
