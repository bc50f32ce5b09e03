use crate::error::{Error, Result};
use crate::state::StateVisitor;
use crate::step::WindowRule;

/// How long windows are, and from which update on they are longer.
#[derive(Clone, Debug)]
pub(super) struct Growth {
    first: WindowRule,
    /// The update from which on windows have a size, and that size, in the unit of `first`.
    changes: Vec<(u64, u64)>,
    /// As the user wrote it.
    described: String,
    /// Updates taken.
    taken: u64,
}

impl Growth {
    pub(super) fn none(first: WindowRule) -> Self {
        Self { first, changes: Vec::new(), described: String::new(), taken: 0 }
    }

    /// Doubles in equal stretches until windows have size `to` from update `steps` on.
    pub(super) fn doubling(&mut self, to: u64, steps: u64) {
        let mut sizes = vec![self.last()];
        while let Some(size) = sizes.last().copied().filter(|size| (1..to).contains(size)) {
            sizes.push(size.saturating_mul(2).min(to));
        }
        let (began, doublings) = (self.began(), sizes.len() as u64 - 1);
        let span = u128::from(steps.saturating_sub(began));
        let start = |nth: u64| began + (span * u128::from(nth) / u128::from(doublings)) as u64;
        let starts = (1..=doublings).map(start);
        self.described.push_str(&format!(".growing({to}, {steps})"));
        if doublings == 0 {
            // Refused by `check`: it does not grow.
            self.changes.push((steps, to));
        } else {
            self.changes.extend(starts.zip(sizes.into_iter().skip(1)));
        }
    }

    pub(super) fn at_step(&mut self, step: u64, size: u64) {
        self.changes.push((step, size));
        self.described.push_str(&format!(".at_step({step}, {size})"));
    }

    pub(super) fn check(&self) -> Result<()> {
        let mut before = (0, size_of(self.first));
        if before.1 == 0 {
            return Err(Error::config("GradAccumulator", "a window has at least one micro-batch or token"));
        }
        for (step, size) in self.changes.iter().copied() {
            if step <= before.0 || size <= before.1 {
                let problem = format!(
                    "windows of {size} from step {step} on, after {} from step {}: give rising sizes at rising \
                     steps, the first one after step 0, and `growing` a step for each doubling",
                    before.1, before.0
                );
                return Err(Error::config("GradAccumulator", problem));
            }
            before = (step, size);
        }
        Ok(())
    }

    /// The rule of the coming window.
    pub(super) fn now(&self) -> WindowRule {
        let begun = self.changes.iter().take_while(|(step, _)| *step <= self.taken);
        self.of(begun.last().map_or(size_of(self.first), |(_, size)| *size))
    }

    /// The rule of the longest windows.
    pub(super) fn longest(&self) -> WindowRule {
        self.of(self.last())
    }

    /// The rule of the first windows.
    pub(super) fn first(&self) -> WindowRule {
        self.first
    }

    pub(super) fn described(&self) -> &str {
        &self.described
    }

    /// An update was taken.
    pub(super) fn stepped(&mut self) {
        self.taken += 1;
    }

    pub(super) fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        if self.changes.is_empty() { Ok(()) } else { visitor.count("taken", &mut self.taken) }
    }

    fn began(&self) -> u64 {
        self.changes.last().map_or(0, |(step, _)| *step)
    }

    fn last(&self) -> u64 {
        self.changes.last().map_or(size_of(self.first), |(_, size)| *size)
    }

    fn of(&self, size: u64) -> WindowRule {
        match self.first {
            WindowRule::Micros(_) => WindowRule::Micros(usize::try_from(size).unwrap_or(usize::MAX)),
            WindowRule::Tokens(_) => WindowRule::Tokens(size),
        }
    }
}

fn size_of(rule: WindowRule) -> u64 {
    match rule {
        WindowRule::Micros(micros) => micros as u64,
        WindowRule::Tokens(tokens) => tokens,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(growth: &mut Growth, steps: u64) -> Vec<u64> {
        let size = |growth: &mut Growth| {
            let size = size_of(growth.now());
            growth.stepped();
            size
        };
        (0..steps).map(|_| size(growth)).collect()
    }

    #[test]
    fn it_doubles_in_equal_stretches_and_ends_at_the_size_that_was_asked_for() {
        let mut growth = Growth::none(WindowRule::Micros(1));
        growth.doubling(8, 6);
        growth.check().unwrap();
        assert_eq!(sizes(&mut growth, 9), [1, 1, 2, 2, 4, 4, 8, 8, 8]);
        assert_eq!(growth.longest(), WindowRule::Micros(8));
        let mut growth = Growth::none(WindowRule::Tokens(3));
        growth.doubling(10, 5);
        growth.check().unwrap();
        // 3, 6 from step 2 on, 10 from step 5 on.
        assert_eq!(sizes(&mut growth, 7), [3, 3, 6, 6, 6, 10, 10]);
        assert_eq!(growth.now(), WindowRule::Tokens(10));
    }

    #[test]
    fn what_does_not_grow_is_refused() {
        let grown = |change: fn(&mut Growth)| {
            let mut growth = Growth::none(WindowRule::Micros(2));
            change(&mut growth);
            growth.check()
        };
        assert!(grown(|growth| growth.at_step(3, 4)).is_ok());
        let bad: [fn(&mut Growth); 7] = [
            |growth| growth.at_step(0, 4),
            |growth| growth.at_step(3, 2),
            |growth| growth.doubling(2, 10),
            |growth| growth.doubling(1, 10),
            |growth| growth.doubling(8, 1),
            |growth| {
                growth.at_step(3, 4);
                growth.at_step(3, 5);
            },
            |growth| {
                growth.at_step(3, 4);
                growth.doubling(8, 3);
            },
        ];
        for (index, change) in bad.into_iter().enumerate() {
            assert!(matches!(grown(change), Err(Error::Config { .. })), "{index}");
        }
        let mut growth = Growth::none(WindowRule::Micros(0));
        growth.doubling(8, 8);
        assert!(growth.check().is_err());
    }
}
