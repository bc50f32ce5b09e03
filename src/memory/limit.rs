use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::ffi;

/// A hard limit on the live bytes of libtorch's CPU allocator, while the guard lives.
///
/// A request that would pass it fails with [`Error::OutOfMemory`] and changes nothing; what
/// is live already stays, even above the limit. Of several guards the strictest holds, in
/// whatever order they are dropped. It counts what every thread holds, so the batches, too, that a
/// [`Loader`](crate::data::Loader) has made ahead while a step runs.
///
/// ```
/// use memfit::memory::{self, Limit};
/// use tch::{Device, Kind, Tensor};
///
/// let live = memory::stats(Device::Cpu)?.current;
/// let limit = Limit::new(live + (1 << 20))?;
/// let refused = Tensor::f_zeros([1 << 20], (Kind::Float, Device::Cpu));
/// assert!(memfit::Error::from(refused.unwrap_err()).is_out_of_memory());
/// drop(limit);
/// Tensor::f_zeros([1 << 20], (Kind::Float, Device::Cpu))?;
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the limit ends when this is dropped"]
pub struct Limit {
    id: u64,
    bytes: u64,
}

impl Limit {
    /// Sets the limit, in bytes.
    ///
    /// # Errors
    /// [`Error::Config`] for 0, [`Error::Unsupported`] where another CPU allocator has taken
    /// the counting one's place.
    pub fn new(bytes: u64) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::config("limit", "must be above 0 bytes"));
        }
        super::counted()?;
        let id = change(|limits| {
            let id = limits.last().map_or(0, |(last, _)| last + 1);
            limits.push((id, bytes));
            id
        });
        Ok(Self { id, bytes })
    }

    /// The limit, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        change(|limits| limits.retain(|(id, _)| *id != self.id));
    }
}

/// Makes one allocation on the CPU fail, to test what a failure leaves behind.
///
/// Refused is the `n`-th request to libtorch's CPU allocator, on any thread, that comes
/// after the guard was made; dropping the guard calls it off. One guard at a time.
#[derive(Debug)]
#[must_use = "the failure is called off when this is dropped"]
pub struct FailAt(());

impl FailAt {
    /// Lets the `n`-th request fail, counted from 1.
    ///
    /// # Errors
    /// [`Error::Config`] for 0, [`Error::Unsupported`] where another CPU allocator has taken
    /// the counting one's place.
    pub fn nth(n: u64) -> Result<Self> {
        if n == 0 || i64::try_from(n).is_err() {
            return Err(Error::config("n", "the first request is number 1"));
        }
        super::counted()?;
        ffi::memory::fail_at(n);
        Ok(Self(()))
    }
}

impl Drop for FailAt {
    fn drop(&mut self) {
        ffi::memory::fail_at(0);
    }
}

static LIMITS: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());

fn change<R>(body: impl FnOnce(&mut Vec<(u64, u64)>) -> R) -> R {
    let mut limits = LIMITS.lock().unwrap_or_else(PoisonError::into_inner);
    let value = body(&mut limits);
    ffi::memory::set_limit(limits.iter().map(|(_, bytes)| *bytes).min());
    value
}
