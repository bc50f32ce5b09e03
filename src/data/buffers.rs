use std::sync::{Arc, Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use super::sample::byte_len;
use crate::error::{Error, Result};
use crate::ffi::bytes::Filling;
use crate::ffi::storage;

/// The memory of batches, used again once nobody holds a batch any more: neither the consumer,
/// nor a view, nor a graph that saved it.
///
/// One per tensor of a batch. It keeps as many buffers as batches can be alive, of one shape.
#[derive(Clone, Debug)]
pub struct Buffers {
    kept: Arc<Mutex<Kept>>,
    most: usize,
}

#[derive(Debug, Default)]
struct Kept {
    buffers: Vec<Buffer>,
    parts: Vec<Buffers>,
}

/// Memory for `rows` samples of one dtype and shape.
#[derive(Debug)]
struct Buffer {
    filling: Filling,
    kind: Kind,
    shape: Vec<i64>,
    rows: usize,
}

impl Buffer {
    fn is_free(&self) -> bool {
        storage::holders(self.filling.tensor()) == 1
    }

    fn has_room(&self, rows: usize, kind: Kind, shape: &[i64]) -> bool {
        self.kind == kind && self.shape == shape && self.rows >= rows
    }
}

impl Buffers {
    /// Keeps up to `most` buffers per tensor of a batch.
    pub(crate) fn keeping(most: usize) -> Self {
        Self { kept: Arc::default(), most }
    }

    /// Those of one part of a sample that has several.
    pub fn part(&self, index: usize) -> Self {
        let mut kept = self.lock();
        while kept.parts.len() <= index {
            kept.parts.push(Self::keeping(self.most));
        }
        kept.parts[index].clone()
    }

    /// Room for `rows` samples of one dtype and shape.
    ///
    /// # Errors
    /// Out of memory.
    pub fn rows(&self, rows: usize, kind: Kind, shape: &[i64]) -> Result<Rows> {
        let bytes =
            byte_len(kind, shape).ok_or_else(|| Error::data(format!("no tensor has the shape {shape:?}")))?;
        let buffer = match self.take(rows, kind, shape) {
            Some(buffer) => buffer,
            None => new(rows, kind, shape)?,
        };
        Ok(Rows { buffer: Some(buffer), rows, bytes, home: self.clone(), moved_up: false })
    }

    /// A buffer that is free; those that are free and of no use go.
    fn take(&self, rows: usize, kind: Kind, shape: &[i64]) -> Option<Buffer> {
        let mut kept = self.lock();
        kept.buffers.retain(|buffer| buffer.has_room(rows, kind, shape) || !buffer.is_free());
        let serves = |buffer: &Buffer| buffer.has_room(rows, kind, shape) && buffer.is_free();
        while let Some(at) = kept.buffers.iter().position(serves) {
            let mut buffer = kept.buffers.swap_remove(at);
            if buffer.filling.is_whole() {
                return Some(buffer);
            }
        }
        None
    }

    fn give_back(&self, buffer: Buffer) {
        let mut kept = self.lock();
        if kept.buffers.len() < self.most {
            kept.buffers.push(buffer);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn new(rows: usize, kind: Kind, shape: &[i64]) -> Result<Buffer> {
    let mut size = vec![rows as i64];
    size.extend_from_slice(shape);
    let filling = Filling::new(Tensor::f_empty(&size, (kind, Device::Cpu))?)?;
    Ok(Buffer { filling, kind, shape: shape.to_vec(), rows })
}

/// One tensor of a batch that is being filled.
#[derive(Debug)]
pub struct Rows {
    /// Taken when this is dropped.
    buffer: Option<Buffer>,
    rows: usize,
    /// Of one row.
    bytes: usize,
    home: Buffers,
    /// The rows that are there stand one after another.
    moved_up: bool,
}

impl Rows {
    /// Copies a sample into its row.
    ///
    /// # Errors
    /// [`Error::Data`] for another dtype or shape than the first sample's.
    pub fn put(&mut self, row: usize, kind: Kind, shape: &[i64], bytes: &[u8]) -> Result<()> {
        let Some(buffer) = &mut self.buffer else { return Ok(()) };
        if buffer.kind != kind || buffer.shape != shape || bytes.len() != self.bytes {
            return Err(Error::data(format!(
                "it has {kind:?} of shape {shape:?} where others of its batch have {:?} of shape {:?}; pad them, \
                 or collate them yourself",
                buffer.kind, buffer.shape
            )));
        }
        if row < self.rows && buffer.filling.put(row * self.bytes, bytes) {
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
        let Some(buffer) = &mut self.buffer else { return Err(Error::data("no rows")) };
        if !self.moved_up {
            self.moved_up = true;
            for (to, from) in present.iter().enumerate() {
                buffer.filling.move_up(from * self.bytes, to * self.bytes, self.bytes);
            }
        }
        Ok(buffer.filling.new_value().f_narrow(0, 0, present.len() as i64)?)
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.home.give_back(buffer);
        }
    }
}
