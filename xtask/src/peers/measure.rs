//! Interleaved measurements of one strategy.

use super::Model;
use super::setup::Work;
use super::side::Side;
use super::strategies::{Has, Strategy};
use crate::problem::Result;

/// Measurements before the first that counts.
pub const WARM_UP: usize = 2;

/// One strategy, measured.
#[derive(Debug)]
pub struct Row {
    pub strategy: &'static Strategy,
    pub memfit: Measured,
    pub pytorch: Option<Measured>,
    /// memfit's time over PyTorch's, pair by pair.
    pub ratio: Option<Spread>,
}

/// One side.
#[derive(Debug, Default)]
pub struct Measured {
    pub peak: u64,
    pub losses: Vec<f64>,
    pub times: Vec<f64>,
    /// Time over that of PyTorch's plain loop, pair by pair.
    pub relative: Spread,
}

/// The median of pairs, and their range.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

/// Trains both sides in turns, PyTorch's plain loop beside them as the measure of time.
pub fn row(
    work: &Work<'_>,
    anchor: &mut Side,
    strategy: &'static Strategy,
    model: &Model,
    pairs: usize,
) -> Result<Row> {
    let memfit = work.memfit(strategy.name)?;
    let pytorch = match strategy.has {
        Has::Both => Some(work.pytorch(strategy.name)?),
        Has::Memfit => None,
    };
    let (memfit, pytorch, ratio) = in_turns(memfit, pytorch, anchor, model.steps, pairs)?;
    Ok(Row { strategy, memfit, pytorch, ratio })
}

/// Both sides' steps in turns with those of `anchor`, which is the measure of time.
pub fn in_turns(
    memfit: Side,
    pytorch: Option<Side>,
    anchor: &mut Side,
    steps: usize,
    pairs: usize,
) -> Result<(Measured, Option<Measured>, Option<Spread>)> {
    let mut memfit = Lane { side: memfit, measured: Measured::default() };
    let mut pytorch = pytorch.map(|side| Lane { side, measured: Measured::default() });
    let mut anchors = Vec::new();
    for round in 0..WARM_UP + pairs {
        let mut lanes: Vec<&mut Lane> = [Some(&mut memfit), pytorch.as_mut()].into_iter().flatten().collect();
        if round % 2 == 1 {
            lanes.reverse();
        }
        for lane in lanes {
            lane.run(steps)?;
        }
        let times = (0..steps).map(|_| anchor.step().map(|step| step.seconds));
        anchors.push(median(times.collect::<Result<Vec<f64>>>()?));
    }
    let memfit = memfit.finish(&anchors);
    let pytorch = pytorch.map(|lane| lane.finish(&anchors));
    let ratio = pytorch.as_ref().map(|pytorch| spread(&memfit.times, &pytorch.times));
    Ok((memfit, pytorch, ratio))
}

struct Lane {
    side: Side,
    measured: Measured,
}

impl Lane {
    fn run(&mut self, steps: usize) -> Result<()> {
        let mut times = Vec::with_capacity(steps);
        for _ in 0..steps {
            let step = self.side.step()?;
            times.push(step.seconds);
            self.measured.peak = self.measured.peak.max(step.peak);
            self.measured.losses.push(step.loss);
        }
        self.measured.times.push(median(times));
        Ok(())
    }

    fn finish(mut self, anchors: &[f64]) -> Measured {
        self.measured.relative = spread(&self.measured.times, anchors);
        self.measured
    }
}

/// Ratios of what was measured one after the other, the warm-up left out.
pub fn spread(times: &[f64], others: &[f64]) -> Spread {
    let pairs = times.iter().zip(others).skip(WARM_UP);
    let ratios: Vec<f64> = pairs.map(|(time, other)| time / other).collect();
    Spread {
        median: median(ratios.clone()),
        least: ratios.iter().copied().fold(f64::INFINITY, f64::min),
        most: ratios.iter().copied().fold(0.0, f64::max),
    }
}

/// The middle one, or between the two.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        length if length % 2 == 0 => (values[middle - 1] + values[middle]) / 2.0,
        _ => values[middle],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_of_pairs_after_the_warm_up() {
        let spread = spread(&[9.0, 9.0, 1.0, 2.0, 6.0], &[1.0, 1.0, 1.0, 1.0, 2.0]);
        assert_eq!((spread.median, spread.least, spread.most), (2.0, 1.0, 3.0));
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.5);
    }
}
