use std::sync::{Mutex, PoisonError};

use tch::Tensor;

use super::phase::Phase;
use super::replay::{Label, replay};
use super::role::Role;
use super::timeline::Timeline;
use crate::error::{Error, Result};
use crate::ffi::timeline::{self as ffi, Event, Now};

/// Events that a recording holds unless told otherwise: 5.2 MB, tens of steps of a small model.
pub const EVENTS: usize = 1 << 17;

/// Records what the CPU allocator does, from when it is made until [`Recording::finish`].
///
/// For a loop of your own; a [`Stack`](crate::Stack) takes
/// [`MemoryTimeline`](crate::strategies::MemoryTimeline) instead. Phases are said with
/// [`Phase::enter`](super::Phase::enter); roles follow from phases and from what is labelled.
///
/// *Cost*: 40 bytes per event, allocated once and outside the counted memory; about 0.01 µs per
/// allocation and per free. Allocations of several threads take turns meanwhile.
///
/// *Limits*: the newest events are kept; where the first ones did not fit, the timeline begins
/// later and says how many are missing ([`Timeline::lost`]). What accelerators allocate is not
/// recorded.
///
/// ```
/// use memfit::memory::{Phase, Recording, Role};
/// use tch::{Device, Kind, Tensor};
///
/// let w = Tensor::ones([1000], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let mut recording = Recording::start()?;
/// recording.label(Role::Parameters, [&w]);
/// let loss = { let _in = Phase::Forward.enter(); (w.exp() * 2.0).sum(Kind::Float) };
/// { let _in = Phase::Backward.enter(); loss.backward(); }
/// recording.label_gradients([&w]);
/// let timeline = recording.finish()?;
/// assert_eq!(timeline.peak().roles[Role::Activations], 4000 + 4); // exp's output, the loss
/// println!("{timeline}");
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "a recording ends when it is dropped"]
pub struct Recording {
    marks: Marks,
    _ring: Ring,
}

impl Recording {
    /// Starts, with room for [`EVENTS`].
    ///
    /// # Errors
    /// As [`Recording::with_capacity`].
    pub fn start() -> Result<Self> {
        Self::with_capacity(EVENTS)
    }

    /// Starts, with room for so many events. Recordings that overlap share their room.
    ///
    /// # Errors
    /// [`Error::Config`] for 0, and for more than the room that another recording has made;
    /// no memory for the room; [`Error::Unsupported`] where another CPU allocator has taken
    /// the counting one's place.
    pub fn with_capacity(events: usize) -> Result<Self> {
        let ring = Ring::open(events)?;
        Ok(Self { marks: Marks::begin(), _ring: ring })
    }

    /// Says what the memory of these tensors is for: of blocks that are alive now, for as long
    /// as they live.
    pub fn label<'a>(&mut self, role: Role, tensors: impl IntoIterator<Item = &'a Tensor>) {
        self.marks.add(role, ffi::blocks_of(tensors, false));
    }

    /// Labels the gradients that these tensors have now.
    pub fn label_gradients<'a>(&mut self, tensors: impl IntoIterator<Item = &'a Tensor>) {
        self.marks.add(Role::Gradients, ffi::blocks_of(tensors, true));
    }

    /// Starts, with room for so many events or for as many as another recording has made.
    pub(crate) fn within(events: usize) -> Result<Self> {
        Self::with_capacity(Ring::room().map_or(events, |room| room.min(events)))
    }

    /// What happened so far.
    ///
    /// # Errors
    /// [`Error::Config`] where none of its events is left.
    pub fn timeline(&self) -> Result<Timeline> {
        self.marks.timeline()
    }

    /// Ends.
    ///
    /// # Errors
    /// As [`Recording::timeline`].
    pub fn finish(self) -> Result<Timeline> {
        self.timeline()
    }
}

/// A stretch of the ring, and what was known in it.
#[derive(Debug)]
pub(crate) struct Marks {
    began: Now,
    ended: Option<Now>,
    labels: Vec<Label>,
    /// Whether what follows the last phase is left out.
    until_idle: bool,
    over: bool,
}

impl Marks {
    pub(crate) fn begin() -> Self {
        Self::begin_again(None, ffi::now())
    }

    /// Begins at a moment, in the room that a stretch nobody needs any more has taken.
    pub(crate) fn begin_again(former: Option<Self>, began: Now) -> Self {
        let mut labels = former.map(|former| former.labels).unwrap_or_default();
        labels.clear();
        Self { began, ended: None, labels, until_idle: false, over: false }
    }

    /// Takes over the roles that were said since event `from`.
    pub(crate) fn know_since(&mut self, from: u64) {
        let at = self.began.next;
        for event in ffi::read(from, at).1 {
            match (event.word & 7, Role::of(event.word)) {
                (0, Some(role)) => {
                    self.labels.push(Label { at, block: event.block, bytes: event.bytes, role });
                }
                (1, _) => self.labels.retain(|label| label.block != event.block),
                _ => {}
            }
        }
    }

    /// Labels blocks that are alive now.
    pub(crate) fn add(&mut self, role: Role, blocks: impl IntoIterator<Item = ffi::Block>) {
        self.add_at(ffi::now().next, role, blocks);
    }

    /// Labels blocks that were alive when event `at` was the next one.
    pub(crate) fn add_at(&mut self, at: u64, role: Role, blocks: impl IntoIterator<Item = ffi::Block>) {
        let known = blocks.into_iter().filter(|block| block.number != 0);
        self.labels.extend(known.map(|block| Label { at, block: block.number, bytes: block.bytes, role }));
    }

    /// The blocks of a role, as far as it was said.
    pub(crate) fn labelled(&self, role: Role) -> impl Iterator<Item = ffi::Block> + '_ {
        let labels = self.labels.iter().filter(move |label| label.role == role);
        labels.map(|label| ffi::Block { number: label.block, bytes: label.bytes })
    }

    /// Takes all labels of a role back: those to come are the truth.
    pub(crate) fn forget(&mut self, role: Role) {
        self.labels.retain(|label| label.role != role);
    }

    /// Leaves out what follows the last phase.
    pub(crate) fn until_idle(self) -> Self {
        Self { until_idle: true, ..self }
    }

    /// The stretch has had its last phase.
    pub(crate) fn is_over(&mut self) {
        self.over = true;
    }

    pub(crate) fn end_if_over(&mut self) {
        if self.over {
            self.end();
        }
    }

    pub(crate) fn end(&mut self) {
        self.end_at(ffi::now());
    }

    pub(crate) fn end_at(&mut self, now: Now) {
        self.ended.get_or_insert(now);
    }

    pub(crate) fn timeline(&self) -> Result<Timeline> {
        let end = self.ended.unwrap_or_else(ffi::now);
        let (first, events) = ffi::read(self.began.next, end.next);
        let lost = first - self.began.next;
        let (began, labels) = match events.first() {
            _ if lost == 0 => (self.began, self.labels.clone()),
            Some(event) => (before(event, first), self.labels_from(first)),
            None => {
                let problem = format!("{lost} events happened and none is left: make room for as many");
                return Err(Error::config("capacity", problem));
            }
        };
        let (events, end) = if self.until_idle { cut(&events, end) } else { (&events[..], end) };
        Ok(Timeline { lost, ..replay(&began, &end, events, &labels) })
    }

    /// Labels that are true of a stretch that begins later: of blocks that stay, and those said
    /// since.
    fn labels_from(&self, first: u64) -> Vec<Label> {
        let stays = |role| matches!(role, Role::Parameters | Role::Buffers | Role::OptimizerState);
        self.labels.iter().filter(|label| label.at > first || stays(label.role)).copied().collect()
    }
}

/// The moment before an event.
fn before(event: &Event, number: u64) -> Now {
    let live = match event.word & 7 {
        0 => event.live.saturating_sub(event.bytes),
        1 => event.live + event.bytes,
        _ => event.live,
    };
    let (ticks, word) = (event.ticks, event.word);
    Now { next: number, oldest: number, live, ticks, word, gone: 0 }
}

/// The events up to the end of the last phase of training.
fn cut(events: &[Event], end: Now) -> (&[Event], Now) {
    let busy = |event: &Event| !matches!(Phase::of(event.word), Phase::Idle | Phase::Evaluate);
    let Some(last) = events.iter().rposition(busy) else { return (events, end) };
    match events.get(last + 1) {
        None => (events, end),
        Some(mark) => (&events[..last + 2], Now { ticks: mark.ticks, word: mark.word, ..end }),
    }
}

/// Keeps the ring open while one of these lives.
#[derive(Debug)]
pub(crate) struct Ring(());

/// How many hold the ring open, and how many events it has room for.
static OPEN: Mutex<(usize, usize)> = Mutex::new((0, 0));

impl Ring {
    pub(crate) fn open(events: usize) -> Result<Self> {
        super::counted()?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let (holders, room) = &mut *open;
        if events == 0 {
            return Err(Error::config("capacity", "must be above 0 events"));
        }
        if *holders > 0 && events > *room {
            let problem = format!("another recording has made room for {room}; ask for as many, or end it");
            return Err(Error::config("capacity", problem));
        }
        if *holders == 0 {
            if !ffi::open(events) {
                return Err(Error::config("capacity", format!("no memory for {events} events")));
            }
            *room = events;
        }
        *holders += 1;
        Ok(Self(()))
    }

    /// The room of the ring that is open, if one is.
    fn room() -> Option<usize> {
        let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        (open.0 > 0).then_some(open.1)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.0 -= 1;
        if open.0 == 0 {
            ffi::close();
        }
    }
}
