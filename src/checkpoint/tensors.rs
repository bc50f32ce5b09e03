use tch::Tensor;

/// What goes in and out of a segment: a tensor, or tuples, vectors, arrays and options of
/// such. Implement it for a struct of your own by mapping its fields.
///
/// ```
/// use memfit::checkpoint::Tensors;
/// use memfit::tch::Tensor;
///
/// struct Masked {
///     tokens: Tensor,
///     mask: Option<Tensor>,
/// }
///
/// impl Tensors for Masked {
///     fn map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
///         Self { tokens: self.tokens.map_tensors(f), mask: self.mask.map_tensors(f) }
///     }
/// }
/// ```
pub trait Tensors: Sized {
    /// The same structure with `f` of each tensor, each visited once, always in one order.
    fn map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Tensor) -> Self;
}

impl Tensors for Tensor {
    fn map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        f(self)
    }
}

impl Tensors for () {
    fn map_tensors(&self, _: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {}
}

impl<T: Tensors> Tensors for Option<T> {
    fn map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        self.as_ref().map(|inner| inner.map_tensors(f))
    }
}

impl<T: Tensors> Tensors for Vec<T> {
    fn map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        self.iter().map(|inner| inner.map_tensors(f)).collect()
    }
}

impl<T: Tensors, const N: usize> Tensors for [T; N] {
    fn map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        std::array::from_fn(|index| self[index].map_tensors(f))
    }
}

macro_rules! tuples {
    ($(($($letter:ident . $index:tt),+))+) => {
        $(impl<$($letter: Tensors),+> Tensors for ($($letter,)+) {
            fn map_tensors(&self, f: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
                ($(self.$index.map_tensors(f),)+)
            }
        })+
    };
}

tuples! {
    (A.0)
    (A.0, B.1)
    (A.0, B.1, C.2)
    (A.0, B.1, C.2, D.3)
    (A.0, B.1, C.2, D.3, E.4)
    (A.0, B.1, C.2, D.3, E.4, F.5)
}

/// Shallow clones of all tensors, in order.
pub(super) fn list(of: &impl Tensors) -> Vec<Tensor> {
    let mut all = Vec::new();
    of.map_tensors(&mut |tensor| {
        all.push(tensor.shallow_clone());
        Tensor::new()
    });
    all
}
