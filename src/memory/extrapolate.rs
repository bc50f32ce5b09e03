//! From runs of a few rows to the step of many.

use super::phase::Phase;
use super::role::{Role, RoleBytes};
use super::timeline::Timeline;

/// One window's forward and backward passes over a few rows.
#[derive(Debug)]
pub(crate) struct Trial {
    pub(crate) rows: i64,
    /// Live bytes before it.
    pub(crate) before: u64,
    /// What its first forward left.
    pub(crate) activations: i64,
    /// Live bytes after its last backward.
    pub(crate) after: u64,
    /// The highest live bytes of each pass, in order.
    pub(crate) passes: Vec<(Phase, u64)>,
    /// Every moment of it, where that was recorded.
    pub(crate) timeline: Option<Timeline>,
}

/// The highest moment of a window of many rows.
#[derive(Clone, Debug)]
pub(crate) struct Foreseen {
    /// Bytes above those before the window.
    pub(crate) growth: u64,
    pub(crate) phase: Phase,
    pub(crate) segment: Option<String>,
    pub(crate) roles: Option<RoleBytes>,
    pub(crate) how: How,
}

/// How a peak was foreseen.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// The rows themselves ran.
    Ran,
    /// Runs of two numbers of rows that differ by one did the same in the same order, and each
    /// of their moments was continued along its line: exact where every tensor's bytes are a
    /// fixed part and a part per row.
    EveryMoment,
    /// As [`How::EveryMoment`], but for the highest moment of each pass only: the runs did not do the same, or
    /// were not recorded. Too low where the peak moves to another moment for more rows.
    EachPass,
    /// One row ran, and its activations and temporaries were multiplied by the rows.
    OneRow,
}

impl std::fmt::Display for How {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Ran => "these rows ran",
            Self::EveryMoment => "continued from a few rows, moment by moment",
            Self::EachPass => "continued from a few rows, pass by pass",
            Self::OneRow => "one row, multiplied",
        })
    }
}

impl Trial {
    pub(crate) fn grown(&self, live: u64) -> i64 {
        live as i64 - self.before as i64
    }

    /// The highest bytes of each pass above those before.
    fn highs(&self) -> Vec<i64> {
        self.passes.iter().map(|(_, peak)| self.grown(*peak)).collect()
    }

    /// The part of each that does not grow with the rows, where one row is all that is known.
    fn fixed(&self) -> Vec<i64> {
        let kept = self.grown(self.after);
        let highs = self.highs().into_iter().enumerate();
        highs.map(|(index, high)| if index == 0 { 0 } else { kept.min(high) }).collect()
    }
}

/// The value at `rows` of a line through its values at `from` rows and at one row more.
pub(crate) fn along(from: i64, values: (i64, i64), rows: i64) -> i64 {
    let (first, next) = (i128::from(values.0), i128::from(values.1));
    let value = first + (next - first) * i128::from(rows - from);
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// The moments of a run, less those of a loop that did the same again: some operators work piece by
/// piece, and have more pieces for more rows.
fn lasting(timeline: &Timeline) -> Vec<(usize, i64)> {
    /// Events of one turn of a loop.
    const TURN: usize = 64;
    let mut kept: Vec<(usize, i64)> = vec![(0, 0)];
    for (index, pair) in timeline.moments().windows(2).enumerate() {
        kept.push((index + 1, pair[1].live as i64 - pair[0].live as i64));
        while let Some(turn) = (1..=TURN.min(kept.len() / 2)).find(|turn| repeats(&kept, *turn)) {
            kept.truncate(kept.len() - turn);
        }
    }
    kept
}

/// Whether the last `turn` events end where they began and are those before them again.
fn repeats(events: &[(usize, i64)], turn: usize) -> bool {
    let (before, last) = events.split_at(events.len() - turn);
    let earlier = &before[before.len() - turn..];
    let same = earlier.iter().zip(last).rev().all(|(a, b)| a.1 == b.1);
    same && last.iter().map(|(_, change)| change).sum::<i64>() == 0
}

/// The moments of two runs side by side, where both did the same in the same order.
fn side_by_side(a: &Trial, b: &Trial) -> Option<Vec<(usize, usize)>> {
    let (a, b) = (a.timeline.as_ref()?, b.timeline.as_ref()?);
    let (first, second) = (lasting(a), lasting(b));
    let phase = |timeline: &Timeline, at: usize| {
        let span = timeline.moments().get(at).and_then(|moment| timeline.span_at(moment.time));
        span.map(|span| span.phase)
    };
    let alike = |((at, change), (other, changed)): (&(usize, i64), &(usize, i64))| {
        change.signum() == changed.signum() && phase(a, *at) == phase(b, *other)
    };
    let same = first.len() == second.len() && first.iter().zip(&second).all(alike);
    same.then(|| first.iter().zip(&second).map(|((at, _), (other, _))| (*at, *other)).collect())
}

/// Whether two runs did the same in the same order, as far as their events tell.
pub(crate) fn alike(a: &Trial, b: &Trial) -> bool {
    side_by_side(a, b).is_some()
}

/// The highest moment of a window of `rows` rows, from the last two trials or the only one.
pub(crate) fn foresee(trials: &[Trial], rows: i64) -> Foreseen {
    let seen = match trials {
        [] => None,
        [one] => from_one(one, rows),
        [.., a, b] => every_moment(a, b, rows).or_else(|| each_pass(a, b, rows)),
    };
    let nothing = Foreseen { growth: 0, phase: Phase::Idle, segment: None, roles: None, how: How::EachPass };
    seen.unwrap_or(nothing)
}

fn from_one(one: &Trial, rows: i64) -> Option<Foreseen> {
    let how = if one.rows == rows { How::Ran } else { How::OneRow };
    let scaled = |bytes: i128| bytes * i128::from(rows) / i128::from(one.rows.max(1));
    let grow = |(all, fixed): (i64, i64)| {
        let grown = i128::from(fixed) + scaled(i128::from(all) - i128::from(fixed));
        i64::try_from(grown).unwrap_or(i64::MAX)
    };
    let Some(timeline) = &one.timeline else {
        let growth = one.highs().into_iter().zip(one.fixed()).map(grow).collect();
        return of_pass(one, growth, how);
    };
    let growing = |roles: &RoleBytes| (roles[Role::Activations] + roles[Role::Temporaries]) as i64;
    let moments = timeline.moments().iter();
    let growth = moments.map(|at| {
        let all = one.grown(at.live);
        grow((all, all - growing(&at.roles)))
    });
    let (at, growth) = highest(growth.collect())?;
    let mut roles = timeline.moments().get(at)?.roles;
    for role in [Role::Activations, Role::Temporaries] {
        roles[role] = u64::try_from(scaled(i128::from(roles[role]))).unwrap_or(u64::MAX);
    }
    Some(at_moment(timeline, at, growth, roles, how))
}

fn every_moment(a: &Trial, b: &Trial, rows: i64) -> Option<Foreseen> {
    let pairs = side_by_side(a, b)?;
    let (first, second) = (a.timeline.as_ref()?, b.timeline.as_ref()?);
    let growth = pairs.iter().map(|(at, other)| {
        let ends = (a.grown(first.moments()[*at].live), b.grown(second.moments()[*other].live));
        along(a.rows, ends, rows)
    });
    let (at, growth) = highest(growth.collect())?;
    let (at, other) = *pairs.get(at)?;
    let (before, after) = (first.moments()[at].roles, second.moments()[other].roles);
    let mut roles = RoleBytes::default();
    for role in Role::ALL {
        let value = along(a.rows, (before[role] as i64, after[role] as i64), rows);
        roles[role] = value.max(0) as u64;
    }
    Some(at_moment(second, other, growth, roles, How::EveryMoment))
}

fn each_pass(a: &Trial, b: &Trial, rows: i64) -> Option<Foreseen> {
    let pairs = a.highs().into_iter().zip(b.highs());
    of_pass(b, pairs.map(|pair| along(a.rows, pair, rows)).collect(), How::EachPass)
}

fn at_moment(timeline: &Timeline, at: usize, growth: u64, roles: RoleBytes, how: How) -> Foreseen {
    let span = timeline.moments().get(at).and_then(|moment| timeline.span_at(moment.time));
    let phase = span.map_or(Phase::Idle, |span| span.phase);
    let segment = span.and_then(|span| span.segment.clone());
    Foreseen { growth, phase, segment, roles: Some(roles), how }
}

fn of_pass(trial: &Trial, growth: Vec<i64>, how: How) -> Option<Foreseen> {
    let (at, growth) = highest(growth)?;
    let phase = trial.passes.get(at)?.0;
    Some(Foreseen { growth, phase, segment: None, roles: None, how })
}

/// The first of the highest.
fn highest(growth: Vec<i64>) -> Option<(usize, u64)> {
    let moments = growth.into_iter().enumerate();
    let (at, grown) = moments.max_by_key(|(at, grown)| (*grown, std::cmp::Reverse(*at)))?;
    Some((at, grown.max(0) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(rows: i64, passes: [u64; 2]) -> Trial {
        let passes = vec![(Phase::Forward, 100 + passes[0]), (Phase::Backward, 100 + passes[1])];
        Trial { rows, before: 100, activations: 0, after: 150, passes, timeline: None }
    }

    #[test]
    fn each_pass_goes_along_its_own_line_and_the_highest_counts() {
        // Forward 30 per row; backward 70 and 10 per row: they cross at 4 rows.
        let trials = [trial(1, [30, 80]), trial(2, [60, 90])];
        let at = |rows| (foresee(&trials, rows).growth, foresee(&trials, rows).phase);
        assert_eq!(at(3), (100, Phase::Backward));
        assert_eq!(at(10), (300, Phase::Forward));
        assert_eq!(foresee(&[trial(2, [60, 90])], 2).growth, 90);
        // 50 bytes of gradients stay, the rest of both passes grows.
        assert_eq!(foresee(&[trial(1, [30, 80])], 10).growth, 350);
        assert_eq!(foresee(&[], 2).growth, 0);
    }
}
