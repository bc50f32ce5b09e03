//! The bytes of a contiguous tensor in CPU memory.

use tch::{Device, Tensor};

use crate::error::{Error, Result};

/// Lets `body` read the bytes.
pub(crate) fn read<R>(tensor: &Tensor, body: impl FnOnce(&[u8]) -> R) -> Result<R> {
    let (data, length) = place(tensor)?;
    if length == 0 {
        return Ok(body(&[]));
    }
    // SAFETY: a contiguous tensor has `length` bytes from `data` on, which the borrow keeps
    // alive; whoever holds the training mutably keeps others from writing meanwhile.
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
