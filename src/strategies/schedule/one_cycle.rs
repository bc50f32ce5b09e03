use super::{Curve, Schedule, check_share, half_cosine};
use crate::error::{Error, Result};

/// Up to the initial rate, which is the *peak* here, and down to almost nothing, within one run.
///
/// Source: Smith and Topin, *Super-Convergence*, 2018: three linear phases, the last one far below
/// the start. By default two cosine phases, as later practice has it. Its shortcomings: the length
/// must be known from the start; the gains in the paper are those of convolutional networks under
/// SGD, and need the peak tuned; the paper moves momentum against the rate, and memfit does
/// not, since momentum is no setting of a parameter group.
///
/// The first update runs at the start's share (1/25), the last one (`steps` − 1) at the end's
/// (1/250,000) and so do all after it; the peak is update `peak_at` × `steps` − 1.
#[derive(Clone, Debug, PartialEq)]
pub struct OneCycle {
    steps: u64,
    phases: Phases,
    peak_at: f64,
    start: f64,
    end: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phases {
    /// Up and down, both half cosines.
    Two,
    /// Up, down to the start, and down to the end, all straight.
    Three,
}

impl OneCycle {
    /// One cycle of `steps` updates, at least two.
    pub fn new(steps: u64) -> Schedule<Self> {
        let (peak_at, start, end) = (0.3, 1.0 / 25.0, 1.0 / 25.0 / 1e4);
        Schedule::new(Self { steps, phases: Phases::Two, peak_at, start, end })
    }

    /// The last update of each phase, and the factor there.
    fn marks(&self) -> [(f64, f64); 3] {
        let (steps, last) = (self.steps as f64, self.steps as f64 - 1.0);
        let peak = self.peak_at * steps - 1.0;
        let back = match self.phases {
            Phases::Two => (last, self.end),
            Phases::Three => (2.0 * self.peak_at * steps - 2.0, self.start),
        };
        [(peak, 1.0), back, (last, self.end)]
    }
}

impl Schedule<OneCycle> {
    /// The paper's three straight phases: up, as long down to the start again, and the rest
    /// down to the end.
    pub fn three_phases(mut self) -> Self {
        self.curve_mut().phases = Phases::Three;
        self
    }

    /// The share of the steps (0.3) that lead up to the peak.
    pub fn peak_at(mut self, share: f64) -> Self {
        self.curve_mut().peak_at = share;
        self
    }

    /// Starts at this share of the peak (1/25).
    pub fn start(mut self, share: f64) -> Self {
        self.curve_mut().start = share;
        self
    }

    /// Ends at this share of the peak (1/250,000).
    pub fn end(mut self, share: f64) -> Self {
        self.curve_mut().end = share;
        self
    }
}

impl Curve for OneCycle {
    fn factor(&self, step: u64, _warm_up: u64) -> f64 {
        let step = step as f64;
        let (mut since, mut from) = (0.0, self.start);
        for (until, to) in self.marks() {
            if step <= until {
                let way = (step - since) / (until - since).max(f64::MIN_POSITIVE);
                let left = match self.phases {
                    Phases::Two => half_cosine(way, 0.0),
                    Phases::Three => 1.0 - way,
                };
                return to + (from - to) * left;
            }
            (since, from) = (until, to);
        }
        self.end
    }

    fn description(&self) -> String {
        let phases = if self.phases == Phases::Three { ".three_phases()" } else { "" };
        let (steps, peak_at, start, end) = (self.steps, self.peak_at, self.start, self.end);
        format!("OneCycle::new({steps}){phases}.peak_at({peak_at}).start({start}).end({end})")
    }

    fn check(&self, warm_up: u64) -> Result<()> {
        if warm_up > 0 {
            return Err(Error::config("OneCycle", "rises by itself: leave .warm_up out, or set .peak_at"));
        }
        let (up, steps) = (self.peak_at * self.steps as f64, self.steps as f64);
        let most = if self.phases == Phases::Two { steps - 1.0 } else { steps / 2.0 };
        if !(up > 1.0 && up <= most) {
            let why = format!("needs more than 1 and at most {most} of its steps up to the peak, not {up}");
            return Err(Error::config("OneCycle", why));
        }
        check_share("OneCycle", "start", self.start)?;
        check_share("OneCycle", "end", self.end)
    }
}
