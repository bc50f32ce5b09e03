use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::phase::Phase;
use super::role::{Role, RoleBytes};

/// What the allocator did over a stretch of training: every block with its role, and the live
/// bytes of every moment. From a [`Recording`](super::Recording) or a
/// [`MemoryTimeline`](crate::strategies::MemoryTimeline).
///
/// Roles are found after the fact: labelled tensors (parameters, buffers, gradients, optimizer
/// state) have theirs, what was made in forward and is alive at its end is an activation, what
/// was made and freed within a phase a temporary. At every moment they add up to the live
/// bytes, to the byte.
///
/// `Display` writes the composition of the peak as tables, [`Timeline::summary`] sets the devices'
/// figures before them; [`Timeline::save`] writes files.
#[derive(Clone, Debug)]
pub struct Timeline {
    pub(super) blocks: Vec<Block>,
    pub(super) moments: Vec<Moment>,
    pub(super) spans: Vec<Span>,
    pub(super) refusals: Vec<Refusal>,
    pub(super) length: Duration,
    pub(super) peak: usize,
    pub(super) lost: u64,
}

/// A block of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Block {
    /// Its number, by order of allocation in the process.
    pub number: u64,
    /// Bytes asked for.
    pub bytes: u64,
    /// What it is for.
    pub role: Role,
    /// The phase that made it; `None` where it is older than the timeline.
    pub phase: Option<Phase>,
    /// The step that made it.
    pub step: u32,
    /// The segment that made it.
    pub segment: Option<String>,
    /// The event that made it, `None` for before the timeline: it is alive from moment `born` + 1.
    pub(super) born: Option<usize>,
    /// The event that freed it, if any.
    pub(super) died: Option<usize>,
}

/// Live bytes after one event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moment {
    /// Since the timeline's start.
    pub time: Duration,
    /// Live bytes, as the allocator counted them.
    pub live: u64,
    /// The same by role.
    pub roles: RoleBytes,
}

/// A stretch of time in one phase, step and segment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Span {
    /// The phase.
    pub phase: Phase,
    /// The step, modulo 2³².
    pub step: u32,
    /// The segment, if one was named.
    pub segment: Option<String>,
    /// Since the timeline's start.
    pub start: Duration,
    /// Since the timeline's start.
    pub end: Duration,
}

impl Span {
    pub(super) fn continues(&self, next: &Self) -> bool {
        (self.phase, self.step, &self.segment) == (next.phase, next.step, &next.segment)
    }
}

/// A request that was refused: out of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// Since the timeline's start.
    pub time: Duration,
    /// Bytes asked for.
    pub bytes: u64,
    /// Live bytes then.
    pub live: u64,
}

/// The moment with the most live bytes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Peak {
    /// Live bytes.
    pub bytes: u64,
    /// Since the timeline's start.
    pub time: Duration,
    /// The phase it fell in.
    pub phase: Phase,
    /// The step it fell in.
    pub step: u32,
    /// The segment it fell in.
    pub segment: Option<String>,
    /// Live bytes by role.
    pub roles: RoleBytes,
    /// Who held them, the largest first.
    pub holders: Vec<Holder>,
}

/// Blocks of one role made by one segment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// What they are for.
    pub role: Role,
    /// The segment that made them.
    pub segment: Option<String>,
    /// Their bytes.
    pub bytes: u64,
    /// How many.
    pub blocks: usize,
}

impl Timeline {
    /// The composition of the peak.
    pub fn peak(&self) -> Peak {
        let moment = self.moments[self.peak];
        let during = self.span_at(moment.time);
        Peak {
            bytes: moment.live,
            time: moment.time,
            phase: during.map_or(Phase::Idle, |span| span.phase),
            step: during.map_or(0, |span| span.step),
            segment: during.and_then(|span| span.segment.clone()),
            roles: moment.roles,
            holders: self.holders(self.peak),
        }
    }

    /// The live bytes at the start and after every event, in order; at least one.
    pub fn moments(&self) -> &[Moment] {
        &self.moments
    }

    /// Blocks that were made, freed or labelled, oldest first as far as they were made here.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// The phases, in order.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Requests that were refused.
    pub fn refusals(&self) -> &[Refusal] {
        &self.refusals
    }

    /// Events before its start that belong to it and are not kept: there was no room for them.
    /// The peak is that of what is left.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// How long it is.
    pub fn length(&self) -> Duration {
        self.length
    }

    /// Who holds the bytes of a moment, counted as in [`Timeline::moments`]; the largest first.
    pub fn holders(&self, moment: usize) -> Vec<Holder> {
        let mut sums: HashMap<(Role, Option<&str>), (u64, usize)> = HashMap::new();
        for block in self.blocks.iter().filter(|block| block.alive_at(moment)) {
            let sum = sums.entry((block.role, block.segment.as_deref())).or_default();
            *sum = (sum.0 + block.bytes, sum.1 + 1);
        }
        let mut holders: Vec<Holder> = sums
            .into_iter()
            .map(|((role, segment), (bytes, blocks))| Holder {
                role,
                segment: segment.map(str::to_owned),
                bytes,
                blocks,
            })
            .collect();
        holders.extend(self.unseen(moment, &holders));
        holders.sort_by(|a, b| {
            b.bytes.cmp(&a.bytes).then_with(|| (a.role, &a.segment).cmp(&(b.role, &b.segment)))
        });
        holders
    }

    /// Bytes that were there before the timeline, stayed, and that nobody labelled.
    fn unseen(&self, moment: usize, holders: &[Holder]) -> Option<Holder> {
        let seen: u64 = holders.iter().map(|holder| holder.bytes).sum();
        let bytes = self.moments.get(moment)?.live.saturating_sub(seen);
        (bytes > 0).then_some(Holder { role: Role::Other, segment: Some(OLDER.to_owned()), bytes, blocks: 0 })
    }

    /// Bytes of a moment by the segment that made them, counted as in [`Timeline::moments`]; the
    /// largest first.
    pub fn segments(&self, moment: usize) -> Vec<(Option<String>, u64)> {
        by_segment(&self.holders(moment))
    }

    /// Each role's own highest bytes, which need not fall together.
    pub fn highest(&self) -> RoleBytes {
        let mut highest = RoleBytes::default();
        for moment in &self.moments {
            for (role, bytes) in moment.roles.iter() {
                highest[role] = highest[role].max(bytes);
            }
        }
        highest
    }

    pub(super) fn span_at(&self, time: Duration) -> Option<&Span> {
        let at = self.spans.partition_point(|span| span.end <= time);
        self.spans.get(at).or(self.spans.last())
    }
}

impl Peak {
    /// Live bytes by the segment that made them, the largest first.
    pub fn segments(&self) -> Vec<(Option<String>, u64)> {
        by_segment(&self.holders)
    }
}

fn by_segment(holders: &[Holder]) -> Vec<(Option<String>, u64)> {
    let mut sums: BTreeMap<Option<&str>, u64> = BTreeMap::new();
    for holder in holders {
        *sums.entry(holder.segment.as_deref()).or_default() += holder.bytes;
    }
    let mut segments: Vec<_> =
        sums.into_iter().map(|(segment, bytes)| (segment.map(str::to_owned), bytes)).collect();
    // Stable: equal ones stay in the order of their names.
    segments.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    segments
}

/// The segment of blocks that are older than the timeline.
pub(super) const OLDER: &str = "(made before)";

impl Block {
    pub(super) fn alive_at(&self, moment: usize) -> bool {
        self.born.is_none_or(|born| born < moment) && self.died.is_none_or(|died| died >= moment)
    }
}
