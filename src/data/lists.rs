use std::ops::Range;

use tch::kind::Element;
use tch::{Kind, Tensor};

use super::buffers::Buffers;
use crate::error::{Error, Result};
use crate::ffi::bytes::{kind_of, of};

/// What [`Pad`](super::Pad) and [`Pack`](super::Pack) lay out: one list, or several of equal length.
pub(super) trait Lists: Send + 'static {
    /// A number for each list.
    type Fill;
    /// A tensor per list, the first one as a part of P.
    type Batch<P>;

    /// Of the first list.
    fn length(&self) -> usize;

    /// A length that another list has.
    fn another_length(&self) -> Option<usize>;

    fn truncate(&mut self, length: usize);

    /// The bytes of a list.
    fn bytes(&self, list: usize) -> &[u8];

    /// The dtype of a list and the bytes of the number that fills it up.
    fn filling(fill: &Self::Fill, list: usize) -> (Kind, &[u8]);

    fn batch<P>(
        first: impl FnOnce(Tensor) -> P,
        tensor: impl Fn(usize) -> Result<Tensor>,
    ) -> Result<Self::Batch<P>>;
}

impl<T: Element + Copy + Send + 'static> Lists for Vec<T> {
    type Fill = T;
    type Batch<P> = P;

    fn length(&self) -> usize {
        self.len()
    }

    fn another_length(&self) -> Option<usize> {
        None
    }

    fn truncate(&mut self, length: usize) {
        self.truncate(length);
    }

    fn bytes(&self, _: usize) -> &[u8] {
        of(self)
    }

    fn filling(fill: &T, _: usize) -> (Kind, &[u8]) {
        (kind_of::<T>(), of(std::slice::from_ref(fill)))
    }

    fn batch<P>(first: impl FnOnce(Tensor) -> P, tensor: impl Fn(usize) -> Result<Tensor>) -> Result<P> {
        Ok(first(tensor(0)?))
    }
}

macro_rules! several_lists {
    ($first:ident, $($other:ident $index:tt $tensor:ty),*) => {
        impl<$first, $($other),*> Lists for (Vec<$first>, $(Vec<$other>),*)
        where
            $first: Element + Copy + Send + 'static,
            $($other: Element + Copy + Send + 'static),*
        {
            type Fill = ($first, $($other),*);
            type Batch<P> = (P, $($tensor),*);

            fn length(&self) -> usize {
                self.0.len()
            }

            fn another_length(&self) -> Option<usize> {
                [$(self.$index.len()),*].into_iter().find(|length| *length != self.0.len())
            }

            fn truncate(&mut self, length: usize) {
                self.0.truncate(length);
                $(self.$index.truncate(length);)*
            }

            fn bytes(&self, list: usize) -> &[u8] {
                match list {
                    $($index => of(&self.$index),)*
                    _ => of(&self.0),
                }
            }

            fn filling(fill: &Self::Fill, list: usize) -> (Kind, &[u8]) {
                match list {
                    $($index => (kind_of::<$other>(), of(std::slice::from_ref(&fill.$index))),)*
                    _ => (kind_of::<$first>(), of(std::slice::from_ref(&fill.0))),
                }
            }

            fn batch<P>(
                first: impl FnOnce(Tensor) -> P,
                tensor: impl Fn(usize) -> Result<Tensor>,
            ) -> Result<Self::Batch<P>> {
                Ok((first(tensor(0)?), $(tensor($index)?),*))
            }
        }
    };
}

several_lists!(A, B 1 Tensor);
several_lists!(A, B 1 Tensor, C 2 Tensor);
several_lists!(A, B 1 Tensor, C 2 Tensor, D 3 Tensor);

/// Refuses lists of unequal length.
pub(super) fn check(lists: &impl Lists) -> Result<()> {
    match lists.another_length() {
        Some(other) => Err(Error::data(format!(
            "its lists have {} and {other} elements; those that are laid out together need as many each",
            lists.length()
        ))),
        None => Ok(()),
    }
}

/// A stretch of a sample's lists, and the element of the batch that it begins at.
pub(super) struct Piece<'a, L> {
    pub(super) lists: &'a L,
    pub(super) range: Range<usize>,
    pub(super) at: usize,
}

/// Rows of `length`, of which the first `used` elements each are pieces'.
pub(super) struct Layout<'a, L> {
    pub(super) pieces: Vec<Piece<'a, L>>,
    pub(super) used: Vec<usize>,
    pub(super) length: usize,
}

impl<L: Lists> Layout<'_, L> {
    /// One list of all samples: `[rows, length]`.
    pub(super) fn tensor(&self, list: usize, fill: &L::Fill, buffers: &Buffers) -> Result<Tensor> {
        let (kind, number) = L::filling(fill, list);
        let (rows, width) = (self.used.len(), number.len());
        let mut room = buffers.part(list).room(kind, vec![rows as i64, self.length as i64])?;
        for Piece { lists, range, at } in &self.pieces {
            room.put(at * width, &lists.bytes(list)[range.start * width..range.end * width]);
        }
        let filling = number.repeat(self.length);
        for (row, used) in self.used.iter().enumerate() {
            room.put((row * self.length + used) * width, &filling[used * width..]);
        }
        room.tensor(rows)
    }
}
