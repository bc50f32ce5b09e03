use tch::Device;

use crate::error::{Error, Result};

/// Zeros for the bytes of a record.
pub(super) fn room(bytes: usize) -> Result<Vec<u8>> {
    let mut room = reserved(bytes)?;
    room.resize(bytes, 0);
    Ok(room)
}

/// An empty list with memory for so many elements, or the error that there is none.
pub(super) fn reserved<T>(elements: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    if list.try_reserve_exact(elements).is_err() {
        let requested = Some((elements as u64).saturating_mul(size_of::<T>() as u64));
        return Err(Error::OutOfMemory { requested, live: None, limit: None, device: Device::Cpu });
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_nobody_has_is_an_error() {
        let Err(Error::OutOfMemory { requested, .. }) = reserved::<i64>(1 << 59) else { panic!() };
        assert_eq!(requested, Some(1 << 62));
        let Err(Error::OutOfMemory { requested, .. }) = reserved::<i64>(usize::MAX) else { panic!() };
        assert_eq!(requested, Some(u64::MAX));
        assert!(room(usize::MAX).is_err());
    }
}
