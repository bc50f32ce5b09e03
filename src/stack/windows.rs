use std::collections::VecDeque;
use std::sync::Arc;

use super::Stack;
use super::clock::Clock;
use super::window::Open;
use crate::error::{Error, Result};
use crate::step::{Batch, DataPosition, WindowRule};

/// A batch with its place in its window.
#[derive(Debug)]
pub struct Micro<B> {
    /// The batch.
    pub batch: B,
    /// From 0.
    pub index: usize,
    /// Whether the window ends with it.
    pub last: bool,
    /// Whether the data ends before the window is full.
    pub short: bool,
    pub(super) of: Option<usize>,
    /// Tokens of the window, this one's included.
    pub(super) tokens: u64,
    /// By which the window ends.
    pub(super) rule: WindowRule,
    /// How far the data is consumed after it.
    pub(super) data: Option<DataPosition>,
}

/// Errors in a row that are looked past: an iterator may give them without end.
const MOST_ERRORS: usize = 4096;

/// Batches with their places in their windows; looks one batch ahead, or a whole window
/// where the optimizer has to know how many micro-batches it will have. From
/// [`Stack::windows`].
///
/// Dropped before its end it takes what it looked at with it: go on with the same one, by
/// [`Iterator::by_ref`], or go back, see [`Stack::windows`].
pub struct Windows<I: Iterator> {
    batches: I,
    /// Batches that were looked at.
    ahead: VecDeque<I::Item>,
    ended: bool,
    clock: Arc<Clock>,
    /// A refusal, given once; nothing follows it.
    refusal: Option<Option<Error>>,
    breaks: u64,
    loads: u64,
    index: usize,
    /// Micro-batches of a window that came from a snapshot: its sums are known from there on.
    known_from: usize,
    /// Tokens of the window before each of its micro-batches, and after the last one given.
    tokens: Vec<u64>,
    rule: WindowRule,
    /// Micro-batches of the window, where they were counted.
    counted: Option<usize>,
}

impl<I, B> Iterator for Windows<I>
where
    I: Iterator<Item = Result<B>>,
    B: Batch,
{
    type Item = Result<Micro<B>>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(refusal) = &mut self.refusal {
            return refusal.take().map(Err);
        }
        if let Err(error) = self.follow() {
            self.refusal = Some(None);
            return Some(Err(error));
        }
        if self.index == 0 {
            match self.count() {
                Ok(counted) => self.counted = counted,
                Err(error) => return Some(Err(error)),
            }
        }
        self.look(1);
        let batch = match self.ahead.pop_front()? {
            Ok(batch) => batch,
            Err(error) => return Some(Err(error)),
        };
        if self.index < self.known_from {
            self.known_from = 0;
            self.tokens = vec![0];
        }
        self.tokens.truncate(self.index - self.known_from + 1);
        let tokens = self.tokens.last().copied().unwrap_or_default() + batch.tokens();
        self.tokens.push(tokens);
        let full = match self.rule {
            WindowRule::Micros(micros) => self.index + 1 >= micros,
            WindowRule::Tokens(wanted) => tokens >= wanted,
        };
        // The end is known where the window was counted; else it takes one batch more.
        let ends = if self.counted == Some(self.index + 1) { !full } else { self.is_end() };
        let of = match self.rule {
            WindowRule::Micros(micros) => Some(self.counted.unwrap_or(micros)),
            WindowRule::Tokens(_) => None,
        };
        let (last, short) = (full || ends, ends && !full);
        let (index, rule, data) = (self.index, self.rule, batch.data_position());
        let micro = Micro { batch, index, last, short, of, tokens, rule, data };
        self.index = if micro.last { 0 } else { self.index + 1 };
        Some(Ok(micro))
    }
}

impl<I, B> Windows<I>
where
    I: Iterator<Item = Result<B>>,
{
    /// Counts the window that begins, where that is asked for. A failed batch has no place in it.
    ///
    /// Where memory ran out, the batch is still to come, perhaps once the caller has freed some: the
    /// error goes out at once, before what was looked at, and the next call counts on.
    fn count(&mut self) -> Result<Option<usize>> {
        let WindowRule::Micros(micros) = self.rule else { return Ok(None) };
        if micros < 2 || !self.clock.whole() {
            return Ok(None);
        }
        let (mut seen, mut good) = (0, 0);
        while good < micros && self.look(seen + 1) > seen {
            let beyond = seen - good >= MOST_ERRORS;
            match self.ahead.get(seen) {
                Some(Err(error)) if beyond || error.is_out_of_memory() => {
                    self.ahead.remove(seen).transpose()?;
                }
                Some(Err(_)) => seen += 1,
                _ => (seen, good) = (seen + 1, good + 1),
            }
        }
        Ok(Some(good))
    }

    /// Whether no batch is to come: errors may, but not of memory, which tell of a batch that does.
    fn is_end(&mut self) -> bool {
        for at in 0..MOST_ERRORS {
            if self.look(at + 1) <= at {
                return true;
            }
            match self.ahead.get(at) {
                Some(Err(error)) if !error.is_out_of_memory() => {}
                _ => return false,
            }
        }
        false
    }

    /// Looks up to `wanted` batches ahead; tells how many there are.
    fn look(&mut self, wanted: usize) -> usize {
        while self.ahead.len() < wanted && !self.ended {
            match self.batches.next() {
                Some(batch) => self.ahead.push_back(batch),
                None => self.ended = true,
            }
        }
        self.ahead.len().min(wanted)
    }
}

impl<I: Iterator> Windows<I> {
    /// Takes up what the stack did since: a failure changes how far its window is. A window
    /// from a snapshot has sums that this one does not know.
    fn follow(&mut self) -> Result<()> {
        let loads = self.clock.loads();
        if loads != self.loads && self.clock.done() > 0 {
            return Err(Error::CallOrder {
                call: "Stack::windows",
                state: "before the state of an open window was loaded".to_owned(),
                remedy: "make a new iterator after the load, over the batches that come next",
            });
        }
        self.loads = loads;
        let breaks = self.clock.breaks();
        if breaks != self.breaks {
            self.breaks = breaks;
            self.index = self.clock.done();
        }
        if self.index == 0 {
            self.rule = self.clock.rule();
        }
        Ok(())
    }
}

impl Stack {
    /// Goes over batches, telling each its place in its window, for [`Stack::step`].
    ///
    /// The stack is not borrowed. With a window open, the first item is an error; a window
    /// that came from a snapshot is gone on with, once. An iterator made before such a window
    /// was loaded ends with an error.
    ///
    /// *Limits*: what was looked ahead to is one batch, or up to a whole window. A loop that is left early
    /// (`break`, `take`) and begun again over the same loader never trains on it. Either keep the
    /// iterator, and its place in the window with it:
    ///
    /// ```
    /// # use memfit::tch::{Device, Kind, Tensor, nn};
    /// # use memfit::{Loss, Stack, optim::{Sgd, SgdConfig}};
    /// # let vs = nn::VarStore::new(Device::Cpu);
    /// # let w = vs.root().zeros("w", &[1]);
    /// # let mut training = Stack::of(&vs, Sgd::new(&vs, SgdConfig::default().lr(0.1))?).build()?;
    /// # let batches = (0..5).map(|number| Tensor::from_slice(&[number as f32]));
    /// # let mut seen = Vec::new();
    /// let mut windows = training.windows(batches);
    /// for part in [2, 3] {
    ///     for micro in windows.by_ref().take(part) {
    ///         let outcome = training.step(micro?, |x| {
    /// #           seen.push(x.double_value(&[0]));
    ///             Ok(Loss::mean((&w * x).mean(Kind::Float), 1))
    ///         })?;
    ///         assert!(outcome.stepped());
    ///     }
    ///     // Evaluate here.
    /// }
    /// # assert_eq!(seen, [0.0, 1.0, 2.0, 3.0, 4.0]);
    /// # Ok::<(), memfit::Error>(())
    /// ```
    ///
    /// or, with a [`Loader`](crate::data::Loader), end the open window and go back to what was
    /// consumed: `loader.seek(position)` with [`Stack::data_position`].
    pub fn windows<B: Batch, I: IntoIterator<Item = B>>(
        &self,
        batches: I,
    ) -> Windows<impl Iterator<Item = Result<B>> + use<B, I>> {
        self.try_windows(batches.into_iter().map(Ok))
    }

    /// As [`Stack::windows`], over batches that can fail; an error is handed on in its place, and has
    /// none in a window: the last good batch ends the last window, whatever errors follow.
    ///
    /// [`Error::OutOfMemory`] is taken for one that may pass: its batch is expected to come with a
    /// further call, as a [`Loader`](crate::data::Loader)'s does; where none comes after all, the window
    /// stays open for [`Stack::flush`]. Where a whole window is looked ahead to, the error comes before
    /// the batches that are there already. Of other errors in a row, up to 4096 are looked past and kept.
    pub fn try_windows<B: Batch, I: IntoIterator<Item = Result<B>>>(
        &self,
        batches: I,
    ) -> Windows<I::IntoIter> {
        let done = self.open.as_ref().map(Open::done);
        let resumed = self.clock.take_resumed().filter(|(at, _)| Some(*at) == done);
        let refusal = if resumed.is_some() { None } else { self.refuse_open("Stack::windows").err() };
        let (index, counted) = resumed.unwrap_or_default();
        Windows {
            batches: batches.into_iter(),
            ahead: VecDeque::new(),
            ended: false,
            clock: self.clock.clone(),
            refusal: refusal.map(Some),
            breaks: self.clock.breaks(),
            loads: self.clock.loads(),
            index,
            known_from: index,
            tokens: vec![counted],
            rule: self.clock.rule(),
            counted: None,
        }
    }
}
