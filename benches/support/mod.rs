//! What each bench prints beside criterion's times: peak bytes, and pairs run in turns.
#![allow(dead_code)]

use std::time::Instant;

use memfit::memory;
use memfit::tch::Device;

/// Prints the highest live bytes above those before, over one run of `body`.
pub fn print_peak(name: &str, mut body: impl FnMut()) {
    body();
    let before = memory::stats(Device::Cpu).map_or(0, |stats| stats.current);
    if let Ok(((), peak)) = memory::peak_of(Device::Cpu, &mut body) {
        println!("{name}: peak {:.3} MB above {:.3} MB", (peak - before) as f64 / 1e6, before as f64 / 1e6);
    }
}

/// Median seconds of one `body` and of one `plain`, run in turns of `runs`.
pub fn in_turns(pairs: usize, runs: usize, mut body: impl FnMut(), mut plain: impl FnMut()) -> (f64, f64) {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..pairs {
        ours.push(seconds(runs, &mut body));
        theirs.push(seconds(runs, &mut plain));
    }
    (median(ours), median(theirs))
}

/// Whether `cargo bench` runs it; a test runs each bench once.
pub fn measures() -> bool {
    std::env::args().any(|argument| argument == "--bench")
}

fn seconds(runs: usize, body: &mut impl FnMut()) -> f64 {
    let start = Instant::now();
    (0..runs).for_each(|_| body());
    start.elapsed().as_secs_f64() / runs as f64
}

/// The middle one.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
