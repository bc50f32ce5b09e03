use tch::kind::Element;
use tch::{Device, Kind, Tensor};

use super::array::Array;
use super::buffers::{Buffers, Rows};
use super::transfer::Transfer;
use crate::error::{Error, Result};
use crate::ffi::bytes::{self, kind_of};
use crate::ffi::storage::StorageId;
use crate::step::Batch;

/// What a record becomes before it is a row of a batch: numbers of one shape.
///
/// | sample | batch of n |
/// | --- | --- |
/// | a number (`f32`, `f64`, `i64`, `i32`, `i16`, `i8`, `u8`, `bool`, `f16`, `bf16`) | `[n]` |
/// | `Vec<T>` of length l, or `[T; L]` | `[n, l]` |
/// | [`Array`] of shape s, of a dtype known when it runs | `[n, s…]` |
/// | [`Tensor`] of shape s on the CPU, dense and without a gradient | `[n, s…]` |
/// | a tuple of up to four samples | a tuple of their batches |
///
/// For other types, implement it over these, or give the loader a
/// [`Collate`](super::Collate) of your own.
pub trait Sample: Send + 'static {
    /// A tensor on the host, or a tuple of them.
    type Batch: Batch + Transfer + Send + 'static;
    /// A batch that is being filled.
    type Rows: Send + 'static;

    /// Room for so many samples of this one's shape.
    ///
    /// # Errors
    /// Out of memory; [`Error::Data`] for a sample that can be in no batch.
    fn rows(&self, rows: usize, buffers: &Buffers) -> Result<Self::Rows>;

    /// Copies the sample into its row.
    ///
    /// # Errors
    /// [`Error::Data`] for another shape or dtype than the others have.
    fn put(&self, rows: &mut Self::Rows, row: usize) -> Result<()>;

    /// The batch; rows that were never filled are left out.
    ///
    /// # Errors
    /// Out of memory.
    fn batch(rows: &mut Self::Rows, present: &[usize]) -> Result<Self::Batch>;
}

/// Bytes of a tensor, where the shape is one.
pub(crate) fn byte_len(kind: Kind, shape: &[i64]) -> Option<usize> {
    let elements =
        shape.iter().try_fold(1_usize, |product, size| product.checked_mul(usize::try_from(*size).ok()?));
    elements?.checked_mul(kind.elt_size_in_bytes())
}

impl Sample for Array {
    type Batch = Tensor;
    type Rows = Rows;

    fn rows(&self, rows: usize, buffers: &Buffers) -> Result<Rows> {
        buffers.rows(rows, self.kind(), self.shape())
    }

    fn put(&self, rows: &mut Rows, row: usize) -> Result<()> {
        rows.put(row, self.kind(), self.shape(), self.bytes())
    }

    fn batch(rows: &mut Rows, present: &[usize]) -> Result<Tensor> {
        rows.batch(present)
    }
}

/// Its bytes are copied once, or twice where they do not lie one after another; libtorch's allocator counts it
/// while it waits. One on another device, one that is sparse or quantized, and one that requires a gradient, which
/// no batch passes on, are errors of their records. Nobody may write to it, or to a tensor that shares its memory,
/// until its batch is there.
impl Sample for Tensor {
    type Batch = Tensor;
    type Rows = Rows;

    fn rows(&self, rows: usize, buffers: &Buffers) -> Result<Rows> {
        refuse(self)?;
        buffers.rows(rows, self.f_kind()?, &self.size())
    }

    fn put(&self, rows: &mut Rows, row: usize) -> Result<()> {
        refuse(self)?;
        // Conjugates and negatives may be a mark on somebody else's bytes.
        let plain = self.f_resolve_conj()?.f_resolve_neg()?.f_contiguous()?;
        let (kind, shape) = (plain.f_kind()?, plain.size());
        bytes::read(&plain, |bytes| rows.put(row, kind, &shape, bytes))?
    }

    fn batch(rows: &mut Rows, present: &[usize]) -> Result<Tensor> {
        rows.batch(present)
    }
}

/// Tensors whose bytes are not their numbers, or not all that they stand for.
fn refuse(tensor: &Tensor) -> Result<()> {
    let bad = |problem: String| Err(Error::data(problem));
    if !tensor.defined() {
        return bad("it is an undefined tensor".to_owned());
    }
    if tensor.device() != Device::Cpu {
        let device = tensor.device();
        return bad(format!(
            "it is on {device:?}; make samples on the CPU: LoaderBuilder::pin moves batches"
        ));
    }
    if tensor.requires_grad() {
        return bad("it requires a gradient, which no batch passes on; detach it".to_owned());
    }
    let quantized = matches!(tensor.f_kind()?, Kind::QInt8 | Kind::QUInt8 | Kind::QInt32);
    if quantized || StorageId::of(tensor).is_none() {
        return bad("it is sparse, quantized or laid out by a library; make it dense (to_dense, dequantize)"
            .to_owned());
    }
    Ok(())
}

macro_rules! number_samples {
    ($($number:ty)*) => {$(
        impl Sample for $number {
            type Batch = Tensor;
            type Rows = Rows;

            fn rows(&self, rows: usize, buffers: &Buffers) -> Result<Rows> {
                buffers.rows(rows, kind_of::<$number>(), &[])
            }

            fn put(&self, rows: &mut Rows, row: usize) -> Result<()> {
                rows.put(row, kind_of::<$number>(), &[], bytes::of(std::slice::from_ref(self)))
            }

            fn batch(rows: &mut Rows, present: &[usize]) -> Result<Tensor> {
                rows.batch(present)
            }
        }
    )*};
}

number_samples!(f32 f64 i64 i32 i16 i8 u8 bool half::f16 half::bf16);

impl<T: Element + Copy + Send + 'static> Sample for Vec<T> {
    type Batch = Tensor;
    type Rows = Rows;

    fn rows(&self, rows: usize, buffers: &Buffers) -> Result<Rows> {
        buffers.rows(rows, kind_of::<T>(), &[self.len() as i64])
    }

    fn put(&self, rows: &mut Rows, row: usize) -> Result<()> {
        rows.put(row, kind_of::<T>(), &[self.len() as i64], bytes::of(self))
    }

    fn batch(rows: &mut Rows, present: &[usize]) -> Result<Tensor> {
        rows.batch(present)
    }
}

impl<T: Element + Copy + Send + 'static, const L: usize> Sample for [T; L] {
    type Batch = Tensor;
    type Rows = Rows;

    fn rows(&self, rows: usize, buffers: &Buffers) -> Result<Rows> {
        buffers.rows(rows, kind_of::<T>(), &[L as i64])
    }

    fn put(&self, rows: &mut Rows, row: usize) -> Result<()> {
        rows.put(row, kind_of::<T>(), &[L as i64], bytes::of(self))
    }

    fn batch(rows: &mut Rows, present: &[usize]) -> Result<Tensor> {
        rows.batch(present)
    }
}

macro_rules! tuple_samples {
    ($($part:ident $index:tt)*) => {
        impl<$($part: Sample),*> Sample for ($($part,)*) {
            type Batch = ($($part::Batch,)*);
            type Rows = ($($part::Rows,)*);

            fn rows(&self, rows: usize, buffers: &Buffers) -> Result<Self::Rows> {
                Ok(($(self.$index.rows(rows, &buffers.part($index))?,)*))
            }

            fn put(&self, rows: &mut Self::Rows, row: usize) -> Result<()> {
                $(self.$index.put(&mut rows.$index, row)?;)*
                Ok(())
            }

            fn batch(rows: &mut Self::Rows, present: &[usize]) -> Result<Self::Batch> {
                Ok(($($part::batch(&mut rows.$index, present)?,)*))
            }
        }
    };
}

tuple_samples!(A 0);
tuple_samples!(A 0 B 1);
tuple_samples!(A 0 B 1 C 2);
tuple_samples!(A 0 B 1 C 2 D 3);
