use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tch::{Device, Kind, Tensor};

use super::sample::byte_len;
use crate::error::{Error, Result};
use crate::ffi::bytes::Filling;
use crate::ffi::storage;

/// The memory of batches, used again once nobody holds a batch any more: neither the consumer,
/// nor a view, nor a graph that saved it.
///
/// One per tensor of a batch. It keeps as many buffers as batches can be alive. A batch takes the smallest
/// one that is free and has room; where none has, those that are free go and a new one of its size comes. Where
/// that does not fit, what is free of the batch's other tensors goes too.
///
/// *Cost*: as many buffers as batches can be alive, each of the bytes of the largest batch that it held. A batch
/// that is kept keeps its whole buffer.
#[derive(Clone, Debug)]
pub struct Buffers {
    kept: Arc<Mutex<Kept>>,
    /// Of all tensors of a batch.
    family: Arc<Mutex<Vec<Weak<Mutex<Kept>>>>>,
    most: usize,
}

#[derive(Debug, Default)]
struct Kept {
    buffers: Vec<Buffer>,
    parts: Vec<Buffers>,
}

impl Kept {
    fn drop_free(&mut self) {
        self.buffers.retain(|buffer| !buffer.is_free());
    }
}

/// Memory for so many elements of one dtype, one after another.
#[derive(Debug)]
struct Buffer {
    filling: Filling,
    kind: Kind,
    elements: usize,
}

impl Buffer {
    fn new(kind: Kind, elements: usize) -> Result<Self> {
        let filling = Filling::new(Tensor::f_empty([elements as i64], (kind, Device::Cpu))?)?;
        Ok(Self { filling, kind, elements })
    }

    fn is_free(&self) -> bool {
        storage::holders(self.filling.tensor()) == 1
    }

    fn has_room(&self, kind: Kind, elements: usize) -> bool {
        self.kind == kind && self.elements >= elements
    }
}

impl Buffers {
    /// Keeps up to `most` buffers per tensor of a batch.
    pub(crate) fn keeping(most: usize) -> Self {
        Self::within(Arc::default(), most)
    }

    fn within(family: Arc<Mutex<Vec<Weak<Mutex<Kept>>>>>, most: usize) -> Self {
        let kept = Arc::default();
        locked(&family).push(Arc::downgrade(&kept));
        Self { kept, family, most }
    }

    /// Those of one part of a sample that has several.
    pub fn part(&self, index: usize) -> Self {
        let mut kept = locked(&self.kept);
        while kept.parts.len() <= index {
            kept.parts.push(Self::within(self.family.clone(), self.most));
        }
        kept.parts[index].clone()
    }

    /// Room for `rows` samples of one dtype and shape.
    ///
    /// # Errors
    /// Out of memory.
    pub fn rows(&self, rows: usize, kind: Kind, shape: &[i64]) -> Result<Rows> {
        let bytes = byte_len(kind, shape).ok_or_else(|| no_tensor(shape))?;
        let mut size = vec![rows as i64];
        size.extend_from_slice(shape);
        let room = self.room(kind, size)?;
        Ok(Rows { room, rows, bytes, moved_up: false })
    }

    /// Room for a tensor.
    pub(super) fn room(&self, kind: Kind, size: Vec<i64>) -> Result<Room> {
        let bytes = byte_len(kind, &size).ok_or_else(|| no_tensor(&size))?;
        let elements = bytes / kind.elt_size_in_bytes();
        let buffer = match self.take(kind, elements) {
            Some(buffer) => buffer,
            None => Buffer::new(kind, elements).or_else(|error| {
                if !error.is_out_of_memory() {
                    return Err(error);
                }
                self.drop_all_free();
                Buffer::new(kind, elements)
            })?,
        };
        Ok(Room { buffer: Some(buffer), kind, size, home: self.clone() })
    }

    /// The smallest buffer that is free and has room; where there is none, those that are free go.
    fn take(&self, kind: Kind, elements: usize) -> Option<Buffer> {
        let mut kept = locked(&self.kept);
        let serves = |buffer: &Buffer| buffer.has_room(kind, elements) && buffer.is_free();
        loop {
            let serving = kept.buffers.iter().enumerate().filter(|(_, buffer)| serves(buffer));
            let Some((at, _)) = serving.min_by_key(|(_, buffer)| buffer.elements) else { break };
            let mut buffer = kept.buffers.swap_remove(at);
            if buffer.filling.is_whole() {
                return Some(buffer);
            }
        }
        // One with room that its holder lets go of just now is kept: the next batch takes it.
        kept.buffers.retain(|buffer| buffer.has_room(kind, elements) || !buffer.is_free());
        None
    }

    fn drop_all_free(&self) {
        // Whoever makes a part locks the list of them last.
        let family = locked(&self.family).clone();
        family.iter().filter_map(Weak::upgrade).for_each(|kept| locked(&kept).drop_free());
    }

    fn give_back(&self, buffer: Buffer) {
        let mut kept = locked(&self.kept);
        if kept.buffers.len() < self.most {
            kept.buffers.push(buffer);
        }
    }
}

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn no_tensor(shape: &[i64]) -> Error {
    Error::data(format!("no tensor has the shape {shape:?}"))
}

/// The beginning of a buffer, as a tensor that is being filled.
#[derive(Debug)]
pub(super) struct Room {
    /// Taken when this is dropped.
    buffer: Option<Buffer>,
    kind: Kind,
    size: Vec<i64>,
    home: Buffers,
}

impl Room {
    /// Copies bytes to `offset`; false where they would not fit.
    pub(super) fn put(&mut self, offset: usize, bytes: &[u8]) -> bool {
        self.buffer.as_mut().is_some_and(|buffer| buffer.filling.put(offset, bytes))
    }

    /// The tensor, with only so many of its rows.
    pub(super) fn tensor(&self, rows: usize) -> Result<Tensor> {
        let Some(buffer) = &self.buffer else { return Err(Error::data("no rows")) };
        let mut size = self.size.clone();
        match size.first_mut() {
            Some(first) if *first >= rows as i64 => *first = rows as i64,
            _ => return Err(Error::data(format!("{rows} rows of a batch of {:?}", self.size))),
        }
        let elements: i64 = size.iter().product();
        // Detached: what somebody does to a batch in place is no history of the batches after it.
        Ok(buffer.filling.new_value().f_detach()?.f_narrow(0, 0, elements)?.f_view(size.as_slice())?)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.home.give_back(buffer);
        }
    }
}

/// One tensor of a batch that is being filled.
#[derive(Debug)]
pub struct Rows {
    room: Room,
    rows: usize,
    /// Of one row.
    bytes: usize,
    /// The rows that are there stand one after another.
    moved_up: bool,
}

impl Rows {
    /// Copies a sample into its row.
    ///
    /// # Errors
    /// [`Error::Data`] for another dtype or shape than the first sample's.
    pub fn put(&mut self, row: usize, kind: Kind, shape: &[i64], bytes: &[u8]) -> Result<()> {
        let wanted = self.room.size.get(1..).unwrap_or_default();
        if self.room.kind != kind || wanted != shape || bytes.len() != self.bytes {
            return Err(Error::data(format!(
                "it has {kind:?} of shape {shape:?} where others of its batch have {:?} of shape {wanted:?}; pad \
                 them (Pad takes a filling for each of several lists), or collate them yourself",
                self.room.kind
            )));
        }
        if row < self.rows && self.room.put(row * self.bytes, bytes) {
            return Ok(());
        }
        Err(Error::data(format!("row {row} of a batch of {}", self.rows)))
    }

    /// The batch's tensor, `[rows, shape…]`, with only the rows that are `present`, in ascending
    /// order; they move up in its memory. No sample comes after it.
    ///
    /// # Errors
    /// libtorch's.
    pub fn batch(&mut self, present: &[usize]) -> Result<Tensor> {
        if let Some(buffer) = self.room.buffer.as_mut().filter(|_| !self.moved_up) {
            self.moved_up = true;
            for (to, from) in present.iter().enumerate() {
                buffer.filling.move_up(from * self.bytes, to * self.bytes, self.bytes);
            }
        }
        self.room.tensor(present.len())
    }
}
