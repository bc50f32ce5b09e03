//! The bytes of a contiguous tensor in CPU memory.

use std::any::TypeId;

use tch::kind::Element;
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};

/// The dtype of a Rust type. tch takes bf16 for f16, which has as many bytes and other numbers.
pub(crate) fn kind_of<T: Element + 'static>() -> Kind {
    match TypeId::of::<T>() == TypeId::of::<half::bf16>() {
        true => Kind::BFloat16,
        false => T::KIND,
    }
}

/// The bytes of numbers.
pub(crate) fn of<T: Element + Copy>(numbers: &[T]) -> &[u8] {
    // SAFETY: tch's elements are numbers and `bool`, which have no padding; the bytes are borrowed
    // as long as the numbers.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), std::mem::size_of_val(numbers)) }
}

/// Whether each byte is a `bool`.
pub(crate) fn are_bools(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte <= 1)
}

/// The numbers of bytes in the machine's order, which may lie anywhere, behind those of a list. `None` for a type
/// that is not of tch's own ones, for half a number, and for bytes that are no `bool`.
pub(crate) fn numbers<T: Element + Copy + 'static>(bytes: &[u8], mut list: Vec<T>) -> Option<Vec<T>> {
    let width = std::mem::size_of::<T>();
    let of_bools = TypeId::of::<T>() == TypeId::of::<bool>();
    if !is_own::<T>() || !bytes.len().is_multiple_of(width) || (of_bools && !are_bools(bytes)) {
        return None;
    }
    let count = bytes.len() / width;
    list.reserve_exact(count);
    // SAFETY: the list has room for as many bytes behind its end, and is ours alone, so that they do not overlap.
    unsafe {
        let end = list.as_mut_ptr().add(list.len());
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), end.cast(), bytes.len());
    }
    // SAFETY: so many elements were written; each pattern is a value of a number's type, and those of
    // `bool` were looked at.
    unsafe { list.set_len(list.len() + count) };
    Some(list)
}

/// tch's `Element` can be implemented for other types, which may have patterns that are no value.
fn is_own<T: 'static>() -> bool {
    let this = TypeId::of::<T>();
    let integers = [TypeId::of::<u8>(), TypeId::of::<i8>(), TypeId::of::<i16>(), TypeId::of::<i32>()];
    let reals = [TypeId::of::<half::f16>(), TypeId::of::<half::bf16>(), TypeId::of::<f32>()];
    let others = [TypeId::of::<i64>(), TypeId::of::<f64>(), TypeId::of::<bool>()];
    integers.contains(&this) || reals.contains(&this) || others.contains(&this)
}

/// The bytes of a new tensor that nobody else reads or writes yet; any thread may fill it.
#[derive(Debug)]
pub(crate) struct Filling {
    tensor: Tensor,
    data: *mut u8,
    length: usize,
}

// SAFETY: a tensor may be used from any thread, and so may the memory that it keeps alive.
unsafe impl Send for Filling {}

impl Filling {
    /// Takes a contiguous CPU tensor, of which there is no other holder.
    pub(crate) fn new(tensor: Tensor) -> Result<Self> {
        let (data, length) = place(&tensor)?;
        Ok(Self { tensor, data, length })
    }

    /// Looks up the memory again, after others had the tensor: they may have given its storage other
    /// bytes. False where it has not enough any more.
    pub(crate) fn is_whole(&mut self) -> bool {
        match place(&self.tensor) {
            Ok((data, length)) if super::storage::nbytes(&self.tensor) >= length => {
                (self.data, self.length) = (data, length);
                true
            }
            _ => false,
        }
    }

    /// Moves bytes to a smaller offset.
    pub(crate) fn move_up(&mut self, from: usize, to: usize, bytes: usize) {
        if bytes == 0 || from <= to || from.checked_add(bytes).is_none_or(|end| end > self.length) {
            return;
        }
        // SAFETY: both ranges lie in the tensor's memory, as in `put`; they may overlap.
        unsafe { std::ptr::copy(self.data.add(from), self.data.add(to), bytes) };
    }

    /// Copies bytes to `offset`; false where they would not fit.
    pub(crate) fn put(&mut self, offset: usize, bytes: &[u8]) -> bool {
        if offset.checked_add(bytes.len()).is_none_or(|end| end > self.length) {
            return false;
        }
        if !bytes.is_empty() {
            // SAFETY: the range lies in the tensor's memory, which lives as long as the tensor and was
            // looked up since others had it; it is ours alone and no Rust reference to it exists.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.data.add(offset), bytes.len()) };
        }
        true
    }

    /// The tensor.
    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The tensor, whose bytes are a new value since.
    pub(crate) fn new_value(&self) -> &Tensor {
        super::tensor::bump(&self.tensor);
        &self.tensor
    }
}

/// Lets `body` read the bytes.
pub(crate) fn read<R>(tensor: &Tensor, body: impl FnOnce(&[u8]) -> R) -> Result<R> {
    let (data, length) = place(tensor)?;
    if length == 0 {
        return Ok(body(&[]));
    }
    // SAFETY: a contiguous tensor has `length` bytes from `data` on, which the borrow keeps
    // alive; whoever holds the training mutably, and whoever gives a sample away, keeps others from
    // writing meanwhile.
    Ok(body(unsafe { std::slice::from_raw_parts(data, length) }))
}

/// Lets `body` write the bytes, and counts a change of the tensor.
pub(crate) fn write<R>(tensor: &Tensor, body: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
    let (data, length) = place(tensor)?;
    if length == 0 {
        return Ok(body(&mut []));
    }
    // SAFETY: as in `read`; nobody else reads or writes meanwhile.
    let written = body(unsafe { std::slice::from_raw_parts_mut(data, length) });
    super::tensor::bump(tensor);
    Ok(written)
}

fn place(tensor: &Tensor) -> Result<(*mut u8, usize)> {
    if tensor.device() != Device::Cpu || !tensor.is_contiguous() || super::storage::is_away(tensor) {
        return Err(Error::Torch("only a contiguous tensor in CPU memory lends its bytes".to_owned()));
    }
    let length = tensor.numel() * tensor.kind().elt_size_in_bytes();
    if length == 0 {
        return Ok((std::ptr::null_mut(), 0));
    }
    let data = tensor.data_ptr().cast::<u8>();
    if data.is_null() {
        return Err(Error::Torch("a tensor without memory lends no bytes".to_owned()));
    }
    Ok((data, length))
}
