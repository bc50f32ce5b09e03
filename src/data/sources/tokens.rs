use std::cell::Cell;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::reader::{Reader, inside};
use super::token_rows::{NextToken, TokenRows};
use crate::data::Origin;
use crate::data::identity::join;
use crate::data::room::{reserved, room};
use crate::error::{Error, Result};

mod sealed {
    /// How a token lies in a file, little-endian.
    pub trait Stored: Copy + Into<i64> + Send + Sync + std::fmt::Debug + 'static {
        const WIDTH: u64;

        fn ids(bytes: &[u8], ids: &mut Vec<i64>);
    }
}
use sealed::Stored;

/// How a token is stored: `u8`, `u16` or `u32`.
pub trait Token: Stored {}

macro_rules! tokens {
    ($($token:ty)*) => {$(
        impl Stored for $token {
            const WIDTH: u64 = size_of::<$token>() as u64;

            fn ids(bytes: &[u8], ids: &mut Vec<i64>) {
                let (tokens, _) = bytes.as_chunks::<{ size_of::<$token>() }>();
                ids.extend(tokens.iter().map(|token| i64::from(<$token>::from_le_bytes(*token))));
            }
        }

        impl Token for $token {}
    )*};
}

tokens!(u8 u16 u32);

/// One long sequence of token ids, in a file of any size or in memory; [`rows`](Self::rows) or
/// [`next_token`](Self::next_token) make records of it.
///
/// A file is the ids of type T one after another, little-endian: what numpy's `tofile` and most
/// tokenizers' scripts write. Each record is one positioned read, checked for its length: a file that was
/// cut underneath is an error of the record, never a bus error. Clones and [`range`](Self::range)s
/// share the open file.
///
/// *Cost*: nothing per token. A thread that reads keeps the bytes of its longest record. The page cache
/// keeps what was read until another program wants the memory, or as
/// [`drop_behind`](Self::drop_behind) says.
///
/// *Limits*: a file that is written over in place, with the same length, is not noticed.
///
/// ```
/// use memfit::data::{Random, Source, Tokens};
///
/// let folder = tempfile::tempdir().unwrap();
/// let path = folder.path().join("corpus.bin");
/// std::fs::write(&path, b"to be or not to be").unwrap();
///
/// let corpus = Tokens::<u8>::open(&path)?.vocabulary(256);
/// let training = corpus.range(0..12)?.next_token(5)?;
/// let (inputs, targets) = training.get(1, &mut Random::of_sample(0, 0, 0))?;
/// assert_eq!(inputs, b" or n".map(i64::from)); // tokens 5..10
/// assert_eq!(targets, b"or no".map(i64::from)); // each one later
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Tokens<T> {
    store: Store<T>,
    first: u64,
    len: u64,
    vocabulary: Option<u64>,
}

/// Tokens that [`Tokens::read`] takes at once, so that its thread keeps no more bytes than these have.
const BLOCK: u64 = 64 << 10;

#[derive(Clone, Debug)]
enum Store<T> {
    File { reader: Reader, header: u64 },
    Memory(Arc<Vec<T>>),
}

impl<T: Token> Tokens<T> {
    /// Opens a file of nothing but tokens.
    ///
    /// # Errors
    /// [`Error::Io`] for what is no regular file; [`Error::Data`] for an empty file and for a length that
    /// is no multiple of a token's.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with_header(path, 0)
    }

    /// Opens a file whose tokens begin after so many bytes of something else.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn open_with_header(path: impl AsRef<Path>, header: u64) -> Result<Self> {
        let reader = Reader::open(path.as_ref())?;
        let Some(bytes) = reader.len().checked_sub(header).filter(|bytes| *bytes > 0) else {
            return Err(reader.broken(format!("no token in {} bytes", reader.len())));
        };
        if bytes % T::WIDTH != 0 {
            let bits = 8 * T::WIDTH;
            return Err(reader.broken(format!(
                "{bytes} bytes are no whole number of tokens of {bits} bits; it is cut short, of another width, \
                 or begins with a header"
            )));
        }
        let len = bytes / T::WIDTH;
        Ok(Self { store: Store::File { reader, header }, first: 0, len, vocabulary: None })
    }

    /// Tokens that are in memory.
    pub fn of(tokens: Vec<T>) -> Self {
        let len = tokens.len() as u64;
        Self { store: Store::Memory(Arc::new(tokens)), first: 0, len, vocabulary: None }
    }

    /// Copies records out of a mapping of the file instead of reading them: no system call per record.
    /// The file's pages count as the process' own while they are resident; they are given back when
    /// more than 64 MiB of them may be: of one mapping, which clones and ranges made from here on
    /// share. In memory it is nothing.
    ///
    /// *Limits*: a file that is cut underneath ends the process with `SIGBUS`, and so does a disk that
    /// fails. Map only what nobody writes. Rows in a shuffled order, of a file larger than what stays
    /// resident, cost a page fault each, which is more than a read.
    ///
    /// # Errors
    /// [`Error::Io`] where the system cannot map it, [`Error::Data`] where the file was cut since it was opened.
    pub fn mapped(self) -> Result<Self> {
        self.remapped(None)
    }

    /// As [`mapped`](Self::mapped), where so many bytes may be resident, and up to 2 MiB more for
    /// each thread that reads.
    ///
    /// # Errors
    /// As for [`mapped`](Self::mapped).
    pub fn mapped_within(self, bytes: u64) -> Result<Self> {
        self.remapped(Some(bytes))
    }

    fn remapped(mut self, resident: Option<u64>) -> Result<Self> {
        if let Store::File { reader, header } = self.store {
            self.store = Store::File { reader: reader.mapped(resident)?, header };
        }
        Ok(self)
    }

    /// Drops what was read from the page cache each time that so many bytes were, in whatever order, so
    /// that a pass over a large file drives out nothing else. The cache then has about so many bytes of
    /// the file, and what the kernel reads ahead. In memory it is nothing.
    pub fn drop_behind(mut self, bytes: u64) -> Self {
        if let Store::File { reader, header } = self.store {
            self.store = Store::File { reader: reader.drop_behind(bytes), header };
        }
        self
    }

    /// Ids of `size` and above are errors, of the record that has one.
    pub fn vocabulary(mut self, size: u64) -> Self {
        self.vocabulary = Some(size);
        self
    }

    /// Some of the tokens, by their numbers: the training's and the validation's part of a file.
    ///
    /// # Errors
    /// [`Error::Config`] for a range beyond the tokens.
    pub fn range(&self, range: Range<u64>) -> Result<Self> {
        let len = inside("Tokens::range", &range, self.len)?;
        Ok(Self { first: self.first + range.start, len, ..self.clone() })
    }

    /// Number of tokens.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Records of `length` tokens, one after the other.
    ///
    /// # Errors
    /// [`Error::Config`] for a length of 0; [`Error::Data`] for fewer tokens than one row has.
    pub fn rows(self, length: u64) -> Result<TokenRows<T>> {
        TokenRows::new(self, length)
    }

    /// Records of `context` tokens and the tokens one later. The next record begins `context` tokens
    /// on, so that each token is an input once.
    ///
    /// # Errors
    /// [`Error::Config`] for a context of 0; [`Error::Data`] for fewer than `context` + 1 tokens.
    pub fn next_token(self, context: u64) -> Result<NextToken<T>> {
        NextToken::new(self, context)
    }

    /// Some of the tokens, by their numbers, as the ids that a record has of them.
    ///
    /// *Cost*: 8 bytes per token, and a buffer of the thread's.
    ///
    /// # Errors
    /// [`Error::Config`] for a range beyond the tokens; as of a record, with the file and the byte
    /// where the range begins, where it was cut or has an id that is not in the vocabulary.
    ///
    /// ```
    /// use memfit::data::Tokens;
    ///
    /// let text = Tokens::of(b"to be or not".to_vec());
    /// assert_eq!(text.read(3..5)?, [b'b', b'e'].map(i64::from));
    /// assert!(text.read(10..13).is_err());
    /// # Ok::<(), memfit::Error>(())
    /// ```
    pub fn read(&self, range: Range<u64>) -> Result<Vec<i64>> {
        let count = inside("Tokens::read", &range, self.len)?;
        // More than can be counted is more than there is memory for.
        let mut ids = reserved(usize::try_from(count).unwrap_or(usize::MAX))?;
        let place = || Origin { record: None, ..self.origin(0, range.start) };
        let mut first = range.start;
        while first < range.end {
            let some = (range.end - first).min(BLOCK);
            self.append(first, some as usize, &mut ids).map_err(|error| match error.is_of_record() {
                true => error.at_record(place),
                false => error,
            })?;
            first += some;
        }
        Ok(ids)
    }

    /// The ids of tokens that lie in here.
    pub(super) fn ids(&self, first: u64, count: usize) -> Result<Vec<i64>> {
        let mut ids = reserved(count)?;
        self.append(first, count, &mut ids)?;
        Ok(ids)
    }

    /// Appends ids to a list that has room for them.
    fn append(&self, first: u64, count: usize, ids: &mut Vec<i64>) -> Result<()> {
        let before = ids.len();
        match &self.store {
            Store::Memory(tokens) => {
                let from = (self.first + first) as usize;
                let some = tokens.get(from..from + count).unwrap_or_default();
                ids.extend(some.iter().map(|token| (*token).into()));
            }
            Store::File { reader, .. } => {
                let offset = self.offset(first).unwrap_or_default();
                with_scratch(count * T::WIDTH as usize, |bytes| {
                    reader.read(offset, bytes)?;
                    T::ids(bytes, ids);
                    Ok(())
                })?;
            }
        }
        self.check(ids.get(before..).unwrap_or_default(), first)
    }

    fn check(&self, ids: &[i64], first: u64) -> Result<()> {
        let Some(size) = self.vocabulary else { return Ok(()) };
        // The common case is one pass that a compiler turns into vector instructions.
        if ids.iter().max().is_none_or(|largest| (*largest as u64) < size) {
            return Ok(());
        }
        let at = ids.iter().position(|id| *id as u64 >= size).unwrap_or_default();
        let id = ids.get(at).copied().unwrap_or_default();
        let place = match self.offset(first + at as u64) {
            Some(offset) => format!("byte {offset}"),
            None => format!("token {}", self.first + first + at as u64),
        };
        Err(Error::data(format!("the id {id} at {place} is not in the vocabulary of {size}")))
    }

    /// Where a token lies in its file; of one that no file has, as far on as can be counted.
    fn offset(&self, token: u64) -> Option<u64> {
        match &self.store {
            Store::File { header, .. } => {
                Some(self.first.saturating_add(token).saturating_mul(T::WIDTH).saturating_add(*header))
            }
            Store::Memory(_) => None,
        }
    }

    pub(super) fn origin(&self, record: u64, first: u64) -> Origin {
        match &self.store {
            Store::File { reader, .. } => reader.origin(record, self.offset(first).unwrap_or_default()),
            Store::Memory(_) => Origin::record(record),
        }
    }

    /// A number of what the tokens' numbers stand for.
    pub(super) fn order(&self) -> u64 {
        let (file, header) = match &self.store {
            Store::File { reader, header } => (reader.order(), *header),
            Store::Memory(_) => (0, 0),
        };
        [T::WIDTH, header, self.first].into_iter().fold(file, join)
    }

    /// There are too few tokens for a row.
    pub(super) fn too_few(&self, wanted: u64) -> Error {
        let problem = format!("{} tokens, where one record has {wanted}", self.len);
        match &self.store {
            Store::File { reader, .. } => reader.broken(problem),
            Store::Memory(_) => Error::data(problem),
        }
    }
}

impl Tokens<u8> {
    /// Some of the tokens without a copy: a `[n]` uint8 tensor over a private mapping of the file. The
    /// rules of [`ArrayFile::view`](super::ArrayFile::view) hold.
    ///
    /// # Errors
    /// [`Error::Config`] for a range beyond the tokens, [`Error::Data`] where the file was cut,
    /// [`Error::Unsupported`] for tokens in memory.
    pub fn view(&self, range: Range<u64>) -> Result<Tensor> {
        let count = inside("Tokens::view", &range, self.len)?;
        match (&self.store, self.offset(range.start)) {
            (Store::File { reader, .. }, Some(offset)) => reader.view(offset, Kind::Uint8, &[count as i64]),
            _ => Err(Error::Unsupported {
                what: "a view of tokens".to_owned(),
                place: "in memory".to_owned(),
                remedy: "make a tensor of them with Tensor::f_from_slice".to_owned(),
            }),
        }
    }
}

/// Lends this thread's memory for bytes that are about to become numbers.
fn with_scratch<R>(bytes: usize, body: impl FnOnce(&mut [u8]) -> Result<R>) -> Result<R> {
    thread_local! {
        static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
    }
    let mut scratch = SCRATCH.take();
    if scratch.len() < bytes {
        scratch = room(bytes)?;
    }
    let (part, _) = scratch.split_at_mut(bytes);
    let done = body(part);
    SCRATCH.set(scratch);
    done
}
