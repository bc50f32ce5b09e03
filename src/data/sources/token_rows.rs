use super::reader::within;
use super::tokens::{Token, Tokens};
use crate::data::identity::join;
use crate::data::room::reserved;
use crate::data::{Origin, Random, Source};
use crate::error::{Error, Result};

/// Records of one length out of a sequence of [`Tokens`]; a sample is its ids.
///
/// *Cost*: 8 bytes per token of the records that are alive.
#[derive(Clone, Debug)]
pub struct TokenRows<T> {
    tokens: Tokens<T>,
    length: u64,
    stride: u64,
    rows: u64,
}

impl<T: Token> TokenRows<T> {
    pub(super) fn new(tokens: Tokens<T>, length: u64) -> Result<Self> {
        if length == 0 {
            return Err(Error::config("Tokens::rows", "a row has at least one token"));
        }
        if tokens.len() < length || usize::try_from(length.saturating_mul(8)).is_err() {
            return Err(tokens.too_few(length));
        }
        Self { tokens, length, stride: 1, rows: 0 }.stride(length)
    }

    /// Tokens from a record's first to the next record's first; a record's length unless set. What
    /// is left at the end and fills no record is left out.
    ///
    /// # Errors
    /// [`Error::Config`] for a stride of 0.
    pub fn stride(mut self, tokens: u64) -> Result<Self> {
        if tokens == 0 {
            return Err(Error::config("TokenRows::stride", "0 would give the same record for ever"));
        }
        self.stride = tokens;
        self.rows = (self.tokens.len() - self.length) / tokens + 1;
        Ok(self)
    }
}

impl<T: Token> Source for TokenRows<T> {
    type Sample = Vec<i64>;

    fn len(&self) -> u64 {
        self.rows
    }

    fn get(&self, index: u64, _: &mut Random) -> Result<Vec<i64>> {
        let index = within(index, self.rows)?;
        self.tokens.ids(index * self.stride, self.length as usize)
    }

    fn origin(&self, index: u64) -> Origin {
        self.tokens.origin(index, index.saturating_mul(self.stride))
    }

    fn order(&self) -> u64 {
        [self.length, self.stride].into_iter().fold(self.tokens.order(), join)
    }
}

/// What language models are trained on: a sample is a context and the tokens one later, both of
/// the same length.
///
/// *Cost*: 16 bytes per token of the records that are alive; one read each.
#[derive(Clone, Debug)]
pub struct NextToken<T>(TokenRows<T>);

impl<T: Token> NextToken<T> {
    pub(super) fn new(tokens: Tokens<T>, context: u64) -> Result<Self> {
        if context == 0 {
            return Err(Error::config("Tokens::next_token", "a context has at least one token"));
        }
        Self(tokens.rows(context.saturating_add(1))?).stride(context)
    }

    /// Tokens from a record's first to the next record's first; the context's length unless set.
    ///
    /// # Errors
    /// [`Error::Config`] for a stride of 0.
    pub fn stride(self, tokens: u64) -> Result<Self> {
        self.0.stride(tokens).map(Self)
    }
}

impl<T: Token> Source for NextToken<T> {
    type Sample = (Vec<i64>, Vec<i64>);

    fn len(&self) -> u64 {
        self.0.len()
    }

    fn get(&self, index: u64, random: &mut Random) -> Result<Self::Sample> {
        let mut inputs = self.0.get(index, random)?;
        let later = inputs.get(1..).unwrap_or_default();
        let mut targets = reserved(later.len())?;
        targets.extend_from_slice(later);
        inputs.pop();
        Ok((inputs, targets))
    }

    fn origin(&self, index: u64) -> Origin {
        self.0.origin(index)
    }

    fn order(&self) -> u64 {
        self.0.order()
    }
}
