//! Where a state comes from and where it goes: memory, or files.

use tch::{Kind, Tensor};

use super::{State, Value};
use crate::error::Result;

/// One saved entry, as far as it is known without reading its bytes.
#[derive(Debug)]
pub(crate) enum Found<'a> {
    /// A tensor; strides where they are not those of a contiguous one.
    Tensor { size: Vec<i64>, kind: Kind, strides: Option<Vec<i64>> },
    /// Anything else.
    Scalar(&'a Value),
}

impl<'a> Found<'a> {
    pub(crate) fn scalar(&self) -> Option<&'a Value> {
        match self {
            Self::Scalar(value) => Some(value),
            Self::Tensor { .. } => None,
        }
    }
}

/// A saved state.
pub(crate) trait Source {
    /// The names of all entries.
    fn names(&self) -> Vec<&str>;

    /// What the entry is.
    fn find(&self, name: &str) -> Option<Found<'_>>;

    /// Writes a saved tensor into one of the same shape and dtype; its version is bumped.
    fn read(&self, name: &str, into: &Tensor) -> Result<()>;
}

/// Takes a state, entry by entry.
pub(crate) trait Sink {
    fn scalar(&mut self, name: &str, value: Value) -> Result<()>;

    fn tensor(&mut self, name: &str, tensor: &Tensor) -> Result<()>;
}

impl Source for State {
    fn names(&self) -> Vec<&str> {
        self.entries.keys().map(String::as_str).collect()
    }

    fn find(&self, name: &str) -> Option<Found<'_>> {
        Some(match self.entries.get(name)? {
            Value::Tensor(tensor) => {
                Found::Tensor { size: tensor.size(), kind: tensor.kind(), strides: strides_of(tensor) }
            }
            scalar => Found::Scalar(scalar),
        })
    }

    fn read(&self, name: &str, into: &Tensor) -> Result<()> {
        if let Some(Value::Tensor(saved)) = self.entries.get(name) {
            tch::no_grad(|| into.shallow_clone().f_copy_(saved))?;
        }
        Ok(())
    }
}

impl Sink for State {
    fn scalar(&mut self, name: &str, value: Value) -> Result<()> {
        self.insert(name, value);
        Ok(())
    }

    fn tensor(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        self.insert(name, Value::Tensor(crate::ffi::tensor::copy_of(tensor)?));
        Ok(())
    }
}

/// The strides of a tensor that is dense, but in another order than a contiguous one.
pub(crate) fn strides_of(tensor: &Tensor) -> Option<Vec<i64>> {
    let strides = tensor.stride();
    (!tensor.is_contiguous() && is_dense(&tensor.size(), &strides)).then_some(strides)
}

/// Whether each element has a place of its own and none is left over.
pub(crate) fn is_dense(size: &[i64], strides: &[i64]) -> bool {
    if size.len() != strides.len() {
        return false;
    }
    let mut dims: Vec<(i64, i64)> =
        strides.iter().copied().zip(size.iter().copied()).filter(|(_, length)| *length != 1).collect();
    dims.sort_unstable();
    let mut expected: i64 = 1;
    dims.into_iter().all(|(stride, length)| {
        let fits = stride == expected;
        match expected.checked_mul(length) {
            Some(next) => expected = next,
            None => return false,
        }
        fits
    })
}

#[cfg(test)]
mod tests {
    use super::is_dense;

    #[test]
    fn only_a_permutation_of_contiguous_strides_is_dense() {
        assert!(is_dense(&[4, 6], &[1, 4]) && is_dense(&[2, 1, 3], &[3, 99, 1]) && is_dense(&[], &[]));
        assert!(!is_dense(&[4, 6], &[1, 8]) && !is_dense(&[4, 6], &[0, 1]) && !is_dense(&[2], &[-1]));
        assert!(!is_dense(&[i64::MAX, 3], &[3, 1]));
    }
}
