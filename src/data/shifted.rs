use tch::{Kind, Tensor};

use crate::error::{Error, Result};

/// What a language model learns from a batch.
#[derive(Debug)]
pub struct Shifted {
    /// `[n, length - 1]`.
    pub inputs: Tensor,
    /// What is to follow each input, int64, or the number that the loss ignores.
    pub labels: Tensor,
    /// Labels that are not ignored: the weight that [`Loss::mean`](crate::Loss::mean) needs.
    pub count: u64,
}

/// Inputs of rows of tokens, and the tokens that follow them; `follows` tells, for each token but a row's first,
/// whether it follows the one before.
pub(super) fn by_tokens(tokens: &Tensor, follows: &Tensor, ignore: i64, count: u64) -> Result<Shifted> {
    let (inputs, labels) = shifted(tokens, tokens, follows, ignore)?;
    Ok(Shifted { inputs, labels, count })
}

/// Inputs of rows of tokens, and the labels that stand beside the tokens that follow them.
pub(super) fn by_labels(tokens: &Tensor, labels: &Tensor, follows: &Tensor, ignore: i64) -> Result<Shifted> {
    let (wanted, there) = (tokens.size(), labels.size());
    if wanted != there {
        return Err(Error::config("next_label", format!("labels of {there:?} beside tokens of {wanted:?}")));
    }
    let (inputs, labels) = shifted(tokens, labels, follows, ignore)?;
    let count = labels.f_ne(ignore)?.f_sum(Kind::Int64)?.f_int64_value(&[])?;
    Ok(Shifted { inputs, labels, count: count.try_into().unwrap_or_default() })
}

/// The length of rows.
pub(super) fn width(rows: &Tensor) -> Result<i64> {
    match rows.size()[..] {
        [_, length] => Ok(length),
        ref other => Err(Error::config("tokens", format!("{other:?} where rows are [n, length]"))),
    }
}

fn shifted(tokens: &Tensor, beside: &Tensor, follows: &Tensor, ignore: i64) -> Result<(Tensor, Tensor)> {
    let width = width(tokens)?;
    let length = (width - 1).max(0);
    let next = beside.f_narrow(1, width - length, length)?.f_to_kind(Kind::Int64)?;
    let ignored = next.f_full_like(ignore)?;
    Ok((tokens.f_narrow(1, 0, length)?, next.f_where_self(follows, &ignored)?))
}
