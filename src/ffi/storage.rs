//! Storages: who they are, their bytes out to a file and back, bytes that leave a storage
//! and return to it.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::raw::{c_char, c_int, c_void};

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::check;
use crate::error::{Error, Result};
use crate::sys::mapping::Private;

#[repr(C)]
struct RawWeakStorage {
    opaque: [u8; 0],
}

#[repr(C)]
struct RawVersion {
    opaque: [u8; 0],
}

unsafe extern "C" {
    fn mf_tensor_dtype(tensor: *const C_tensor) -> c_int;
    fn mf_storage_nbytes(tensor: *const C_tensor) -> u64;
    fn mf_storage_watch(tensor: *const C_tensor) -> *mut RawWeakStorage;
    fn mf_storage_unwatch(watch: *mut RawWeakStorage);
    fn mf_storage_holders(tensor: *const C_tensor) -> usize;
    fn mf_storage_over(
        data: *mut c_void,
        dtype: c_int,
        sizes: *const i64,
        dims: usize,
        context: *mut c_void,
        release: unsafe extern "C" fn(*mut c_void),
        tensor: *mut *mut C_tensor,
    ) -> c_int;
    fn mf_storage_base(tensor: *const C_tensor, base: *mut *mut C_tensor) -> c_int;
    fn mf_storage_view(
        base: *const C_tensor,
        dtype: c_int,
        offset: i64,
        sizes: *const i64,
        strides: *const i64,
        dims: usize,
        view: *mut *mut C_tensor,
    ) -> c_int;
    fn mf_storage_take(tensor: *const C_tensor, message: *const c_char, bytes: *mut *mut C_tensor) -> c_int;
    fn mf_storage_give(tensor: *const C_tensor, bytes: *const C_tensor) -> c_int;
    fn mf_storage_away(tensor: *const C_tensor) -> c_int;
    fn mf_storage_data(base: *const C_tensor) -> *mut c_void;
    fn mf_version_watch(tensor: *const C_tensor) -> *mut RawVersion;
    fn mf_version_now(watch: *const RawVersion) -> u64;
    fn mf_version_unwatch(watch: *mut RawVersion);
    fn mf_operator_number() -> u64;
}

/// Who a storage is, without keeping its bytes: its address is not reused while this lives.
#[derive(Debug)]
pub(crate) struct StorageId {
    watch: *mut RawWeakStorage,
    address: usize,
}

// SAFETY: reference counts are atomic; any thread may ask and drop.
unsafe impl Send for StorageId {}
// SAFETY: asking changes nothing.
unsafe impl Sync for StorageId {}

impl StorageId {
    /// The identity of a tensor's storage; `None` where it has none.
    pub(crate) fn of(tensor: &Tensor) -> Option<Self> {
        // SAFETY: the handle is borrowed for the call.
        let watch = unsafe { mf_storage_watch(tensor.as_ptr()) };
        (!watch.is_null()).then(|| Self { watch, address: super::tensor::storage_identity(tensor) })
    }

    /// A number no other storage has while this identity lives.
    pub(crate) fn key(&self) -> usize {
        self.address
    }
}

impl Drop for StorageId {
    fn drop(&mut self) {
        // SAFETY: the pointer is owned and given back once.
        unsafe { mf_storage_unwatch(self.watch) }
    }
}

/// A tensor's version counter, without its bytes.
#[derive(Debug)]
pub(crate) struct Version(*mut RawVersion);

// SAFETY: the counter is atomic and reference-counted atomically.
unsafe impl Send for Version {}
// SAFETY: asking changes nothing.
unsafe impl Sync for Version {}

impl Version {
    /// The counter of a tensor, shared by its views; `None` for inference tensors.
    pub(crate) fn of(tensor: &Tensor) -> Option<Self> {
        // SAFETY: the handle is borrowed for the call.
        let watch = unsafe { mf_version_watch(tensor.as_ptr()) };
        (!watch.is_null()).then_some(Self(watch))
    }

    /// Its count now.
    pub(crate) fn now(&self) -> u64 {
        // SAFETY: the pointer is owned by self.
        unsafe { mf_version_now(self.0) }
    }
}

impl Drop for Version {
    fn drop(&mut self) {
        // SAFETY: the pointer is owned and given back once.
        unsafe { mf_version_unwatch(self.0) }
    }
}

/// Which part of a storage a tensor shows, and as what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct View {
    dtype: c_int,
    offset: i64,
    sizes: Vec<i64>,
    strides: Vec<i64>,
}

impl View {
    /// The view that a tensor is.
    pub(crate) fn of(tensor: &Tensor) -> Self {
        Self {
            // SAFETY: the handle is borrowed for the call.
            dtype: unsafe { mf_tensor_dtype(tensor.as_ptr()) },
            offset: tensor.storage_offset(),
            sizes: tensor.size(),
            strides: tensor.stride(),
        }
    }

    /// The same view of another storage.
    pub(crate) fn over(&self, base: &Tensor) -> Result<Tensor> {
        let mut view = std::ptr::null_mut();
        // SAFETY: the base is borrowed, both lists have `dims` entries; `view` is written on
        // success.
        check(unsafe {
            mf_storage_view(
                base.as_ptr(),
                self.dtype,
                self.offset,
                self.sizes.as_ptr(),
                self.strides.as_ptr(),
                self.sizes.len(),
                &mut view,
            )
        })?;
        // SAFETY: the handle is owned by us alone.
        Ok(unsafe { Tensor::from_ptr(view) })
    }
}

/// Bytes of the whole storage, there or away.
pub(crate) fn nbytes(tensor: &Tensor) -> usize {
    // SAFETY: the handle is borrowed for the call.
    unsafe { mf_storage_nbytes(tensor.as_ptr()) as usize }
}

/// Tensors, views and graphs that hold the storage of a tensor now; 1 where nobody else does.
pub(crate) fn holders(tensor: &Tensor) -> usize {
    // SAFETY: the handle is borrowed for the call.
    unsafe { mf_storage_holders(tensor.as_ptr()) }
}

/// A contiguous tensor over a mapping, which goes when the last tensor, view or graph that holds the
/// storage does.
pub(crate) fn over(mapping: Private, kind: Kind, sizes: &[i64]) -> Result<Tensor> {
    let bytes = sizes.iter().try_fold(kind.elt_size_in_bytes(), |product, size| {
        usize::try_from(*size).ok().and_then(|size| product.checked_mul(size))
    });
    let data = mapping.as_mut_ptr();
    if bytes != Some(mapping.len()) || !data.addr().is_multiple_of(kind.elt_size_in_bytes()) {
        return Err(Error::Torch(format!("{kind:?} {sizes:?} does not lie in {} bytes", mapping.len())));
    }
    let like = Tensor::f_empty([0], (kind, Device::Cpu))?;
    let context = Box::into_raw(Box::new(mapping));
    let mut tensor = std::ptr::null_mut();
    // SAFETY: the memory holds the sizes at the dtype's alignment and lives until `unmap` is called with
    // the context, once; `tensor` is written on success.
    check(unsafe {
        mf_storage_over(
            data.cast(),
            mf_tensor_dtype(like.as_ptr()),
            sizes.as_ptr(),
            sizes.len(),
            context.cast(),
            unmap,
            &mut tensor,
        )
    })?;
    // SAFETY: the handle is owned by us alone.
    Ok(unsafe { Tensor::from_ptr(tensor) })
}

/// Ends a mapping, on whichever thread drops its last holder.
unsafe extern "C" fn unmap(context: *mut c_void) {
    // SAFETY: the context is the box that `over` gave away; libtorch calls this once.
    drop(unsafe { Box::from_raw(context.cast::<Private>()) });
}

/// All bytes of a tensor's storage as one-dimensional uint8, sharing the storage but not
/// the version counter.
pub(crate) fn base(tensor: &Tensor) -> Result<Tensor> {
    let mut base = std::ptr::null_mut();
    // SAFETY: the handle is borrowed; `base` is written on success.
    check(unsafe { mf_storage_base(tensor.as_ptr(), &mut base) })?;
    // SAFETY: the handle is owned by us alone.
    Ok(unsafe { Tensor::from_ptr(base) })
}

/// Takes the bytes out of a storage. Until they return, reading it fails with `message`;
/// device, identity, size, views and version stay.
pub(crate) fn take(tensor: &Tensor, message: &str) -> Result<Tensor> {
    let message = CString::new(message).unwrap_or_default();
    let mut bytes = std::ptr::null_mut();
    // SAFETY: both pointers are borrowed; `bytes` is written on success.
    check(unsafe { mf_storage_take(tensor.as_ptr(), message.as_ptr(), &mut bytes) })?;
    // SAFETY: the handle is owned by us alone.
    Ok(unsafe { Tensor::from_ptr(bytes) })
}

/// Gives bytes back to a storage they were taken from: the same, or ones that were filled
/// with the same.
pub(crate) fn give(tensor: &Tensor, bytes: Tensor) -> Result<()> {
    // SAFETY: both handles are borrowed for the call.
    check(unsafe { mf_storage_give(tensor.as_ptr(), bytes.as_ptr()) })
}

/// Whether the bytes of a tensor's storage are away.
pub(crate) fn is_away(tensor: &Tensor) -> bool {
    // SAFETY: the handle is borrowed for the call.
    unsafe { mf_storage_away(tensor.as_ptr()) != 0 }
}

/// Changes from one operator that builds graph to the next, per thread.
pub(crate) fn operator_number() -> u64 {
    // SAFETY: reads a thread-local number.
    unsafe { mf_operator_number() }
}

/// Writes all bytes of a CPU tensor's storage to a file at `offset`.
pub(crate) fn write_to(tensor: &Tensor, file: &File, offset: u64) -> Result<io::Result<()>> {
    let (data, size) = data(tensor)?;
    Ok(transfer(size, |done| {
        // SAFETY: the range lies in the storage, which the borrowed tensor keeps alive; the
        // kernel copies, so other writers could tear the copy but not the process.
        unsafe {
            libc::pwrite(
                file.as_raw_fd(),
                data.add(done).cast_const(),
                size - done,
                (offset + done as u64) as libc::off_t,
            )
        }
    }))
}

/// Fills a CPU tensor's storage from a file at `offset`; nobody else may know the tensor.
pub(crate) fn read_from(tensor: &mut Tensor, file: &File, offset: u64) -> Result<io::Result<()>> {
    let (data, size) = data(tensor)?;
    Ok(transfer(size, |done| {
        // SAFETY: the range lies in the storage, which the borrowed tensor keeps alive.
        unsafe {
            libc::pread(file.as_raw_fd(), data.add(done), size - done, (offset + done as u64) as libc::off_t)
        }
    }))
}

fn data(tensor: &Tensor) -> Result<(*mut c_void, usize)> {
    let size = nbytes(tensor);
    // SAFETY: the handle is borrowed for the call.
    let data = unsafe { mf_storage_data(tensor.as_ptr()) };
    if data.is_null() && size > 0 {
        return Err(Error::Torch("only bytes in CPU memory go to a file".to_owned()));
    }
    Ok((data, size))
}

fn transfer(size: usize, mut some: impl FnMut(usize) -> isize) -> io::Result<()> {
    let mut done = 0;
    while done < size {
        match some(done) {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            moved if moved > 0 => done += moved as usize,
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}
