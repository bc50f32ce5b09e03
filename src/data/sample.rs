use tch::kind::Element;
use tch::{Kind, Tensor};

use super::buffers::{Buffers, Rows};
use super::transfer::Transfer;
use crate::error::{Error, Result};
use crate::ffi::bytes::kind_of;
use crate::step::Batch;

/// What a record becomes before it is a row of a batch: numbers of one shape.
///
/// | sample | batch of n |
/// | --- | --- |
/// | a number (`f32`, `f64`, `i64`, `i32`, `i16`, `i8`, `u8`, `bool`, `f16`, `bf16`) | `[n]` |
/// | `Vec<T>` of length l, or `[T; L]` | `[n, l]` |
/// | [`Array`] of shape s, of a dtype known when it runs | `[n, s…]` |
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
    /// Out of memory.
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

/// Numbers of any dtype and shape, on the heap and not in libtorch's hands.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    kind: Kind,
    shape: Vec<i64>,
    bytes: Vec<u8>,
}

impl Array {
    /// From bytes in the machine's own order.
    ///
    /// # Errors
    /// A number of bytes that the shape does not have.
    pub fn from_bytes(kind: Kind, shape: Vec<i64>, bytes: Vec<u8>) -> Result<Self> {
        match byte_len(kind, &shape) {
            Some(wanted) if wanted == bytes.len() => Ok(Self { kind, shape, bytes }),
            _ => Err(Error::data(format!("{} bytes for {kind:?} of shape {shape:?}", bytes.len()))),
        }
    }

    /// From numbers.
    ///
    /// # Errors
    /// A number of elements that the shape does not have.
    pub fn from_vec<T: Element + Copy + 'static>(shape: Vec<i64>, numbers: &[T]) -> Result<Self> {
        Self::from_bytes(kind_of::<T>(), shape, crate::ffi::bytes::of(numbers).to_vec())
    }

    /// The dtype.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The shape.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// The bytes, in the machine's own order.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
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
        buffers.rows(rows, self.kind, &self.shape)
    }

    fn put(&self, rows: &mut Rows, row: usize) -> Result<()> {
        rows.put(row, self.kind, &self.shape, &self.bytes)
    }

    fn batch(rows: &mut Rows, present: &[usize]) -> Result<Tensor> {
        rows.batch(present)
    }
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
                rows.put(row, kind_of::<$number>(), &[], crate::ffi::bytes::of(std::slice::from_ref(self)))
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
        rows.put(row, kind_of::<T>(), &[self.len() as i64], crate::ffi::bytes::of(self))
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
        rows.put(row, kind_of::<T>(), &[L as i64], crate::ffi::bytes::of(self))
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
