use tch::{Kind, Tensor};

use crate::error::Result;

/// What a language model learns from a batch.
#[derive(Debug)]
pub struct Shifted {
    /// `[n, length - 1]`.
    pub inputs: Tensor,
    /// The token after each input, int64, or the number that the loss ignores.
    pub labels: Tensor,
    /// Labels that are not ignored: the weight that [`Loss::mean`](crate::Loss::mean) needs.
    pub count: u64,
}

/// Inputs and labels of rows of tokens; `follows` tells, for each token but a row's first, whether
/// it follows the one before.
pub(super) fn shifted(tokens: &Tensor, follows: &Tensor, ignore: i64, count: u64) -> Result<Shifted> {
    let length = (tokens.size()[1] - 1).max(0);
    let next = tokens.f_narrow(1, tokens.size()[1] - length, length)?.f_to_kind(Kind::Int64)?;
    let ignored = next.f_full_like(ignore)?;
    Ok(Shifted {
        inputs: tokens.f_narrow(1, 0, length)?,
        labels: next.f_where_self(follows, &ignored)?,
        count,
    })
}
