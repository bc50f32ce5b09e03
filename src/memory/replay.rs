//! From events to a timeline: first every block's role, then the live bytes of each moment.

use std::collections::HashMap;
use std::time::Duration;

use super::phase::{Phase, name_of, segment_names, segment_of, step_of};
use super::role::{Role, RoleBytes};
use super::timeline::{Block, Moment, Refusal, Span, Timeline};
use crate::ffi::timeline::{self as ffi, Event, Now};

/// What a block was known to be for at a moment at which it was alive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Label {
    /// The number of the first event after that moment.
    pub(crate) at: u64,
    pub(crate) block: u64,
    pub(crate) bytes: u64,
    pub(crate) role: Role,
}

const TAKEN: u64 = 0;
const GIVEN: u64 = 1;
const REFUSED: u64 = 2;
const MARK: u64 = 3;

fn kind(event: &Event) -> u64 {
    event.word & 7
}

fn foreign(word: u64) -> bool {
    word >> 10 & 1 == 1
}

/// Makes the timeline of a stretch of events.
pub(crate) fn replay(began: &Now, ended: &Now, events: &[Event], labels: &[Label]) -> Timeline {
    let mut blocks = Blocks::default();
    let mut labels = labels.iter().peekable();
    let mut phase = Phase::of(began.word);
    for (index, event) in events.iter().enumerate() {
        let number = began.next + index as u64;
        while let Some(label) = labels.next_if(|label| label.at <= number) {
            blocks.label(label);
        }
        match kind(event) {
            TAKEN => blocks.take(index, event),
            GIVEN => blocks.give(index, event),
            // What is alive where memory runs out waits for backward, though an error drops it
            // before its phase has ended.
            REFUSED => blocks.outlive(phase),
            MARK if Phase::of(event.word) != phase => {
                blocks.phase_ends(phase);
                phase = Phase::of(event.word);
            }
            _ => {}
        }
    }
    labels.for_each(|label| blocks.label(label));
    blocks.phase_ends(phase);
    let names = segment_names();
    let blocks: Vec<Block> = blocks.all.into_iter().map(|made| made.finish(&names)).collect();
    let at = clock(began);
    let moments = compose(began, events, &blocks, &at);
    let peak = highest(&moments);
    Timeline {
        spans: spans(began, ended, events, &names, &at),
        refusals: events.iter().filter(|event| kind(event) == REFUSED).map(|e| refusal(e, &at)).collect(),
        length: at(ended.ticks),
        lost: 0,
        blocks,
        moments,
        peak,
    }
}

/// From ticks to the time since the beginning.
fn clock(began: &Now) -> impl Fn(u64) -> Duration + use<> {
    let (scale, start) = (ffi::scale(), began.ticks);
    move |ticks| Duration::from_nanos((ticks.saturating_sub(start) as f64 * scale) as u64)
}

fn refusal(event: &Event, at: impl Fn(u64) -> Duration) -> Refusal {
    Refusal { time: at(event.ticks), bytes: event.bytes, live: event.live }
}

/// A block on its way to a role.
#[derive(Debug)]
struct Made {
    number: u64,
    bytes: u64,
    born: Option<usize>,
    died: Option<usize>,
    word: u64,
    labelled: Option<Role>,
    outlived_its_phase: bool,
}

impl Made {
    fn role(&self) -> Role {
        if let Some(role) = self.labelled.or_else(|| Role::of(self.word)) {
            return role;
        }
        match (self.born, Phase::of(self.word)) {
            (None, _) | (_, Phase::Idle) => Role::Other,
            // A prefetching thread's batch is no activation.
            (_, Phase::Forward | Phase::Recompute) if self.outlived_its_phase && foreign(self.word) => {
                Role::Other
            }
            (_, Phase::Forward | Phase::Recompute) if self.outlived_its_phase => Role::Activations,
            _ if self.died.is_some() => Role::Temporaries,
            _ => Role::Other,
        }
    }

    fn finish(self, names: &[String]) -> Block {
        Block {
            number: self.number,
            bytes: self.bytes,
            role: self.role(),
            phase: self.born.map(|_| Phase::of(self.word)),
            step: step_of(self.word),
            segment: self.born.and_then(|_| name_of(names, segment_of(self.word))).map(str::to_owned),
            born: self.born,
            died: self.died,
        }
    }
}

#[derive(Debug, Default)]
struct Blocks {
    all: Vec<Made>,
    live: HashMap<u64, usize>,
    /// Made since the phase began.
    of_phase: Vec<usize>,
}

impl Blocks {
    fn add(&mut self, number: u64, bytes: u64, born: Option<(usize, u64)>) -> usize {
        let index = self.all.len();
        let (born, word) = born.map_or((None, 0), |(at, word)| (Some(at), word));
        let (died, labelled, outlived_its_phase) = (None, None, false);
        self.all.push(Made { number, bytes, born, died, word, labelled, outlived_its_phase });
        self.live.insert(number, index);
        index
    }

    fn take(&mut self, at: usize, event: &Event) {
        let index = self.add(event.block, event.bytes, Some((at, event.word)));
        self.of_phase.push(index);
    }

    fn give(&mut self, at: usize, event: &Event) {
        // One that nobody has seen was made before the recording.
        let known = self.live.get(&event.block).copied();
        let index = known.unwrap_or_else(|| self.add(event.block, event.bytes, None));
        self.all[index].died = Some(at);
        self.live.remove(&event.block);
    }

    fn label(&mut self, label: &Label) {
        let known = self.live.get(&label.block).copied();
        let index = known.unwrap_or_else(|| self.add(label.block, label.bytes, None));
        self.all[index].labelled.get_or_insert(label.role);
    }

    /// What is alive outlives the phase that made it.
    fn outlive(&mut self, phase: Phase) {
        for index in &self.of_phase {
            let made = &mut self.all[*index];
            made.outlived_its_phase |= made.died.is_none() && Phase::of(made.word) == phase;
        }
    }

    fn phase_ends(&mut self, phase: Phase) {
        self.outlive(phase);
        self.of_phase.clear();
    }
}

/// The live bytes after each event, by role. They add up to what the allocator counted.
fn compose(began: &Now, events: &[Event], blocks: &[Block], at: &impl Fn(u64) -> Duration) -> Vec<Moment> {
    let mut roles = RoleBytes::default();
    for block in blocks.iter().filter(|block| block.born.is_none()) {
        roles[block.role] += block.bytes;
    }
    roles[Role::Other] += began.live.saturating_sub(roles.total());
    let mut born: Vec<Option<&Block>> = vec![None; events.len()];
    let mut died = born.clone();
    for block in blocks {
        block.born.into_iter().for_each(|at| born[at] = Some(block));
        block.died.into_iter().for_each(|at| died[at] = Some(block));
    }
    let mut moments = Vec::with_capacity(events.len() + 1);
    moments.push(Moment { time: Duration::ZERO, live: began.live, roles });
    for (index, event) in events.iter().enumerate() {
        if let Some(block) = born[index] {
            roles[block.role] += block.bytes;
        }
        if let Some(block) = died[index] {
            roles[block.role] = roles[block.role].saturating_sub(block.bytes);
        }
        moments.push(Moment { time: at(event.ticks), live: event.live, roles });
    }
    moments
}

/// The first of the moments with the most live bytes.
fn highest(moments: &[Moment]) -> usize {
    let mut peak = 0;
    for (index, moment) in moments.iter().enumerate() {
        if moment.live > moments[peak].live {
            peak = index;
        }
    }
    peak
}

/// Stretches with one phase, step and segment.
fn spans(
    began: &Now,
    ended: &Now,
    events: &[Event],
    names: &[String],
    at: &impl Fn(u64) -> Duration,
) -> Vec<Span> {
    let marks = events.iter().filter(|event| kind(event) == MARK);
    let marks = marks.map(|event| (event.ticks, event.word));
    let mut spans: Vec<Span> = Vec::new();
    let (mut since, mut word) = (began.ticks, began.word);
    for (ticks, next) in marks.chain([(ended.ticks, 0)]) {
        let span = Span {
            phase: Phase::of(word),
            step: step_of(word),
            segment: name_of(names, segment_of(word)).map(str::to_owned),
            start: at(since),
            end: at(ticks),
        };
        match spans.last_mut() {
            Some(last) if last.continues(&span) => last.end = span.end,
            _ if span.end > span.start => spans.push(span),
            _ => {}
        }
        (since, word) = (ticks, next);
    }
    spans
}
