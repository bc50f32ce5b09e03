use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::ffi::timeline::{self, is_on, set_phase};

/// What training does at a moment. One value for the whole process, so that an accelerator's
/// backward threads are in the phase that the driver is in; one thread at a time enters phases.
///
/// A [`Stack`](crate::Stack) enters phases by itself; a loop of your own says them:
///
/// ```
/// use memfit::memory::Phase;
/// use tch::{Device, Kind, Tensor};
///
/// let w = Tensor::ones([4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let loss = { let _in = Phase::Forward.enter(); w.square().sum(Kind::Float) };
/// { let _in = Phase::Backward.enter(); loss.backward(); }
/// assert_eq!(Phase::now(), Phase::Idle);
/// ```
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Between steps: data, logging.
    #[default]
    Idle,
    /// A forward pass of training.
    Forward,
    /// A segment's second forward, in backward.
    Recompute,
    /// A backward pass.
    Backward,
    /// From the last backward of a window to the parameters' new values.
    Update,
    /// A forward pass without gradients.
    Evaluate,
}

const PHASE: u64 = 0b111 << 3;
const SEGMENT: u64 = 0xffff << 16;
const STEP: u64 = 0xffff_ffff << 32;

impl Phase {
    pub(crate) const ALL: [Self; 6] =
        [Self::Idle, Self::Forward, Self::Recompute, Self::Backward, Self::Update, Self::Evaluate];

    /// Is in this phase until the guard is dropped, then in the former one again.
    pub fn enter(self) -> InPhase {
        InPhase::set(PHASE | SEGMENT, (self as u64) << 3)
    }

    /// As [`Phase::enter`], and says which step it belongs to, modulo 2³².
    pub fn enter_step(self, step: u64) -> InPhase {
        InPhase::set(PHASE | SEGMENT | STEP, (step << 32) | ((self as u64) << 3))
    }

    /// The phase now.
    pub fn now() -> Self {
        Self::of(timeline::phase())
    }

    /// In lower case, as files and tables have it.
    pub fn name(self) -> &'static str {
        ["idle", "forward", "recompute", "backward", "update", "evaluate"][self as usize]
    }

    pub(crate) fn of(word: u64) -> Self {
        Self::ALL.get(((word & PHASE) >> 3) as usize).copied().unwrap_or_default()
    }
}

/// The step of a word.
pub(crate) fn step_of(word: u64) -> u32 {
    (word >> 32) as u32
}

/// The segment's number in a word; 0 is none.
pub(crate) fn segment_of(word: u64) -> u16 {
    ((word & SEGMENT) >> 16) as u16
}

/// Puts the former phase back when dropped, also by a panic.
#[derive(Debug)]
#[must_use = "the phase ends when this is dropped"]
pub struct InPhase {
    mask: u64,
    former: u64,
    // Guards nest on the thread that steps.
    not_send: PhantomData<*mut ()>,
}

impl InPhase {
    fn set(mask: u64, word: u64) -> Self {
        Self { mask, former: set_phase(mask, word), not_send: PhantomData }
    }
}

impl Drop for InPhase {
    fn drop(&mut self) {
        set_phase(self.mask, self.former);
    }
}

/// Names the stretch of a model that runs until the guard is dropped: memory made meanwhile is
/// listed under this name. Segments nest. Checkpointed segments name themselves. As a phase, it
/// is one for the process. A process has room for 65,534 names: name blocks, not steps; further
/// ones are listed as "(other segments)".
///
/// *Cost*: a load where nobody watches; else about 0.2 µs.
///
/// ```
/// let _block = memfit::memory::segment("block 3");
/// ```
pub fn segment(name: &str) -> InSegment {
    InSegment(is_on().then(|| InPhase::set(SEGMENT, u64::from(number_of(name)) << 16)))
}

/// Enters the recompute of a segment.
pub(crate) fn recompute(name: &str) -> InSegment {
    let word = || ((Phase::Recompute as u64) << 3) | (u64::from(number_of(name)) << 16);
    InSegment(is_on().then(|| InPhase::set(PHASE | SEGMENT, word())))
}

/// Leaves the segment when dropped.
#[derive(Debug)]
#[must_use = "the segment ends when this is dropped"]
pub struct InSegment(Option<InPhase>);

impl Drop for InSegment {
    fn drop(&mut self) {
        self.0.take();
    }
}

/// Names that were seen while somebody watched; a name's number is its place + 1.
#[derive(Default)]
struct Names {
    numbers: HashMap<String, u16>,
    names: Vec<String>,
}

static NAMES: Mutex<Option<Names>> = Mutex::new(None);

fn names() -> MutexGuard<'static, Option<Names>> {
    NAMES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All names beyond the last number share it.
const OTHERS: u16 = u16::MAX;

fn number_of(name: &str) -> u16 {
    let mut names = names();
    let names = names.get_or_insert_default();
    if let Some(number) = names.numbers.get(name) {
        return *number;
    }
    let number = u16::try_from(names.names.len() + 1).unwrap_or(OTHERS);
    if number < OTHERS {
        names.names.push(name.to_owned());
        names.numbers.insert(name.to_owned(), number);
    }
    number
}

/// The names so far, by number - 1.
pub(crate) fn segment_names() -> Vec<String> {
    names().as_ref().map(|names| names.names.clone()).unwrap_or_default()
}

/// The name of a number; none for 0.
pub(crate) fn name_of(names: &[String], number: u16) -> Option<&str> {
    match number {
        0 => None,
        OTHERS => Some("(other segments)"),
        number => names.get(usize::from(number) - 1).map(String::as_str),
    }
}
