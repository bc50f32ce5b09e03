use std::sync::Arc;

use tch::Kind;
use tch::kind::Element;

use super::room::reserved;
use super::sample::byte_len;
use crate::error::{Error, Result};
use crate::ffi::bytes::{self, kind_of};

/// Numbers of any dtype and shape, on the heap and not in libtorch's hands.
///
/// *Cost*: their bytes; a clone shares them.
///
/// ```
/// use memfit::data::Array;
/// use memfit::tch::Kind;
///
/// let row = Array::from_vec(vec![2, 2], vec![0.5_f32, 1.0, 1.5, 2.0])?;
/// assert_eq!((row.kind(), row.numbers::<f32>()?[3]), (Kind::Float, 2.0));
/// assert_eq!(row.numbers::<i64>().unwrap_err().to_string(), "the data: it has Float numbers where Int64 is read");
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Clone)]
pub struct Array {
    kind: Kind,
    shape: Vec<i64>,
    /// A vector of whatever type they were made in, since memory goes back as that.
    numbers: Arc<dyn Numbers>,
}

trait Numbers: Send + Sync {
    fn bytes(&self) -> &[u8];
}

impl<T: Element + Copy + Send + Sync> Numbers for Vec<T> {
    fn bytes(&self) -> &[u8] {
        bytes::of(self)
    }
}

impl Array {
    /// From bytes in the machine's own order, which are not copied.
    ///
    /// # Errors
    /// A number of bytes that the shape does not have; a bool that is neither 0 nor 1.
    pub fn from_bytes(kind: Kind, shape: Vec<i64>, bytes: Vec<u8>) -> Result<Self> {
        if kind == Kind::Bool && !bytes::are_bools(&bytes) {
            return Err(Error::data("a bool is neither true nor false"));
        }
        Self::over(kind, shape, bytes)
    }

    /// From numbers: a vector's are not copied, a slice's are.
    ///
    /// # Errors
    /// A number of elements that the shape does not have.
    pub fn from_vec<T>(shape: Vec<i64>, numbers: impl Into<Vec<T>>) -> Result<Self>
    where
        T: Element + Copy + Send + Sync + 'static,
    {
        Self::over(kind_of::<T>(), shape, numbers.into())
    }

    fn over(kind: Kind, shape: Vec<i64>, numbers: impl Numbers + 'static) -> Result<Self> {
        let length = numbers.bytes().len();
        if byte_len(kind, &shape) != Some(length) {
            return Err(Error::data(format!("{length} bytes for {kind:?} of shape {shape:?}")));
        }
        Ok(Self { kind, shape, numbers: Arc::new(numbers) })
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
        self.numbers.bytes()
    }

    /// A copy of the numbers, of which those of the last dimension stand side by side.
    ///
    /// # Errors
    /// [`Error::Data`] where T is not the dtype's type; nothing is converted. [`Error::OutOfMemory`].
    pub fn numbers<T: Element + Copy + 'static>(&self) -> Result<Vec<T>> {
        let wanted = kind_of::<T>();
        if wanted != self.kind {
            return Err(Error::data(format!("it has {:?} numbers where {wanted:?} is read", self.kind)));
        }
        let list = reserved(self.bytes().len() / size_of::<T>().max(1))?;
        bytes::numbers(self.bytes(), list).ok_or_else(|| {
            Error::data(format!("{} is not a number type of tch's own", std::any::type_name::<T>()))
        })
    }
}

impl PartialEq for Array {
    fn eq(&self, other: &Self) -> bool {
        self.kind == other.kind && self.shape == other.shape && self.bytes() == other.bytes()
    }
}

impl std::fmt::Debug for Array {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Array")
            .field("kind", &self.kind)
            .field("shape", &self.shape)
            .field("bytes", &self.bytes())
            .finish()
    }
}
