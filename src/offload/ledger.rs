//! Which storages forward has saved, which of them left, and which come back next.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tch::Tensor;

use super::carrier::Carrier;
use super::entry::{Entry, Slot};
use super::moved::Observer;
use crate::error::Result;
use crate::ffi::storage::{self, StorageId};
use crate::saved::Unpack;

/// What stays and what is brought back early.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) min_bytes: usize,
    pub(crate) keep_last: usize,
    /// Storages brought back before backward asks; `None`: one from the host, none from disk.
    pub(crate) prefetch: Option<usize>,
}

/// The books of one offload of activations.
#[derive(Debug)]
pub(crate) struct Ledger {
    carrier: Arc<Carrier>,
    observer: Observer,
    rules: Rules,
    books: Mutex<Books>,
    reader: Mutex<Option<SyncSender<Asked>>>,
    ahead: Arc<AtomicUsize>,
    me: Weak<Ledger>,
}

#[derive(Debug, Default)]
struct Books {
    /// Storages by identity and version.
    known: HashMap<(usize, u64), Weak<Entry>>,
    order: BTreeMap<u64, Weak<Entry>>,
    /// Not moved yet, with the operator that saved them.
    waiting: VecDeque<(Weak<Entry>, u64)>,
    next: u64,
}

/// A storage to read ahead, and the round that it is for: a graph that is kept has several.
type Asked = (Weak<Entry>, u64);

/// One storage that came back before anybody asked.
#[derive(Debug)]
pub(crate) struct Ahead(Arc<AtomicUsize>);

impl Drop for Ahead {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Ledger {
    pub(crate) fn new(carrier: Arc<Carrier>, observer: Observer, rules: Rules) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            carrier,
            observer,
            rules,
            books: Mutex::default(),
            reader: Mutex::default(),
            ahead: Arc::default(),
            me: me.clone(),
        })
    }

    /// Takes a saved tensor, or declines it.
    ///
    /// Its bytes leave when the next operator saves, not now: an operator may save a tensor
    /// before it fills it.
    pub(crate) fn pack(&self, tensor: &Tensor) -> Result<Option<Unpack>> {
        let operator = storage::operator_number();
        self.move_out(Some(operator), self.rules.keep_last)?;
        if !self.wants(tensor) {
            return Ok(None);
        }
        let Some(id) = StorageId::of(tensor) else { return Ok(None) };
        let entry = self.entry(id, tensor, operator)?;
        let mut slot = Slot::new(entry, tensor);
        let (carrier, observer) = (self.carrier.clone(), self.observer.clone());
        Ok(Some(Box::new(move || slot.unpack(&carrier, &observer))))
    }

    /// Moves out what waits, but for the last ones that stay.
    ///
    /// # Errors
    /// Those of the disk.
    pub(crate) fn settle(&self) -> Result<()> {
        self.move_out(None, self.rules.keep_last)
    }

    fn wants(&self, tensor: &Tensor) -> bool {
        let bytes = storage::nbytes(tensor);
        bytes >= self.rules.min_bytes.max(1)
            && self.carrier.takes(tensor.device())
            && !tensor.is_sparse()
            && !tensor.is_conj()
            && !tensor.is_neg()
            && !storage::is_away(tensor)
    }

    fn entry(&self, id: StorageId, tensor: &Tensor, operator: u64) -> Result<Arc<Entry>> {
        let base = storage::base(tensor)?;
        let mut books = self.books();
        let number = books.next;
        let entry = Arc::new(Entry::new(id, base, tensor, number, self.me.clone()));
        if let Some(known) = books.known.get(&entry.key()).and_then(Weak::upgrade) {
            drop(books);
            return Ok(known);
        }
        books.next += 1;
        books.known.insert(entry.key(), Arc::downgrade(&entry));
        books.order.insert(number, Arc::downgrade(&entry));
        books.waiting.push_back((Arc::downgrade(&entry), operator));
        drop(books);
        Ok(entry)
    }

    fn move_out(&self, operator: Option<u64>, keep: usize) -> Result<()> {
        loop {
            let mut books = self.books();
            let due = books.waiting.len() > keep
                && books.waiting.front().is_some_and(|(_, saved_by)| Some(*saved_by) != operator);
            let entry = if due { books.waiting.pop_front() } else { return Ok(()) };
            drop(books);
            if let Some(entry) = entry.and_then(|(entry, _)| entry.upgrade()) {
                entry.leave(&self.carrier, &self.observer)?;
            }
        }
    }

    /// Forgets an entry that nobody uses any more.
    pub(crate) fn forget(&self, key: (usize, u64), number: u64) {
        let mut books = self.books();
        if books.order.remove(&number).is_some()
            && books.known.get(&key).is_some_and(|e| e.strong_count() == 0)
        {
            books.known.remove(&key);
        }
    }

    /// Backward has asked for the entry of this number, for the `round + 1`-th time: the ones before
    /// it come next.
    pub(crate) fn look_ahead(&self, number: u64, round: u64) {
        let wanted = self.rules.prefetch.unwrap_or(1);
        let before: Vec<Arc<Entry>> = {
            let books = self.books();
            books
                .order
                .range(..number)
                .rev()
                .filter_map(|(_, entry)| entry.upgrade())
                .take(wanted.max(2))
                .collect()
        };
        for (index, entry) in before.into_iter().enumerate() {
            if entry.on_host() && index < wanted {
                self.fetch(&entry, round);
            } else if self.rules.prefetch.is_some_and(|wanted| index < wanted) {
                self.send((Arc::downgrade(&entry), round));
            } else if index > 0 {
                entry.announce();
            }
        }
    }

    fn fetch(&self, entry: &Entry, round: u64) {
        if let Some(ahead) = claim(&self.ahead, self.rules.prefetch.unwrap_or(1)) {
            // Whoever asks for it meets the error again.
            let _ = entry.fetch_ahead(round, &self.carrier, &self.observer, ahead);
        }
    }

    fn send(&self, asked: Asked) {
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = reader.get_or_insert_with(|| {
            let (sender, receiver) = sync_channel(self.rules.prefetch.unwrap_or(1).max(1));
            let (carrier, observer, ahead) =
                (self.carrier.clone(), self.observer.clone(), self.ahead.clone());
            let most = self.rules.prefetch.unwrap_or(1);
            let run = move || read_ahead(&receiver, &carrier, &observer, &ahead, most);
            // Without a thread nothing comes early: the channel is closed.
            let _ = std::thread::Builder::new().name("memfit-read-ahead".to_owned()).spawn(run);
            sender
        });
        let _ = sender.try_send(asked);
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Room for one more storage ahead of its asker, of `most`.
fn claim(ahead: &Arc<AtomicUsize>, most: usize) -> Option<Ahead> {
    ahead
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| (now < most).then_some(now + 1))
        .ok()
        .map(|_| Ahead(ahead.clone()))
}

fn read_ahead(
    entries: &Receiver<Asked>,
    carrier: &Carrier,
    observer: &Observer,
    ahead: &Arc<AtomicUsize>,
    most: usize,
) {
    while let Ok((entry, round)) = entries.recv() {
        let Some(entry) = entry.upgrade() else { continue };
        if let Some(ahead) = claim(ahead, most) {
            // Whoever asks for it meets the error again.
            let _ = entry.fetch_ahead(round, carrier, observer, ahead);
        }
    }
}
