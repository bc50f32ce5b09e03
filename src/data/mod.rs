//! Data that never fills memory: files that stay files, records that threads read ahead, batches
//! of which few are alive.
//!
//! A [`Source`] has records by number, a [`Stream`] one after another; a [`Loader`] makes batches of
//! either, ahead of the training. `docs/data.md` is the manual.
//!
//! *Cost*: at most `prefetch` batches are ready or in the making, one is in the step, and one may be
//! looked ahead to: (prefetch + 2) × the bytes of a batch, for any number of workers, and a
//! sample per worker. A shuffled order takes no memory; a shuffled stream has its buffer.
//!
//! *When it acts*: on threads of its own, beside the step; without workers in `next`.
//!
//! *Limits*: transforms are `Send + Sync`. Of a batch that is kept, its memory is kept. Unix is
//! needed.
//!
//! ```
//! use memfit::Result;
//! use memfit::data::{Loader, Random, Source};
//!
//! struct Squares;
//! impl Source for Squares {
//!     type Sample = (f32, i64);
//!     fn len(&self) -> u64 { 10 }
//!     fn get(&self, index: u64, _: &mut Random) -> Result<Self::Sample> {
//!         Ok(((index * index) as f32, index as i64))
//!     }
//! }
//! let mut loader = Loader::new(Squares).batch(4).shuffle(1).workers(2).build()?;
//! let sizes: Vec<i64> = loader.by_ref().map(|batch| Ok(batch?.batch.0.size()[0])).collect::<Result<_>>()?;
//! assert_eq!((sizes, loader.epoch()), (vec![4, 4, 2], 1));
//! # Ok::<(), memfit::Error>(())
//! ```

mod array;
mod bad;
mod buffers;
mod builder;
mod cached;
mod caught;
mod collate;
mod deliver;
pub(crate) mod dtype;
mod ends;
mod engine;
mod feed;
mod identity;
mod lists;
mod loaded;
mod loader;
mod order;
mod pack;
mod pad;
mod random;
mod room;
mod sample;
mod shifted;
mod slot;
mod source;
mod sources;
mod stage;
mod stream;
mod stream_feed;
mod streams;
mod transfer;

pub use crate::origin::Origin;
pub use crate::step::{DataPosition, Mark};
pub use array::Array;
pub use buffers::{Buffers, Rows};
pub use builder::LoaderBuilder;
pub use collate::{Collate, Stacked, Waiting, With};
pub use feed::Tail;
pub use loaded::Loaded;
pub use loader::Loader;
pub use pack::{Pack, Packed};
pub use pad::{Pad, Padded};
pub use random::Random;
pub use sample::Sample;
pub use shifted::Shifted;
pub use source::Source;
pub use sources::{
    ArrayFile, Concat, FileBytes, Files, InMemory, NextToken, Npy, Safetensors, Slice, Token, TokenRows,
    Tokens, Zip,
};
pub use stream::{Interrupt, Stream};
pub use stream_feed::StreamJob;
pub use streams::{Csv, Fields, Line, Lines, Part, Row, json, numbers};
pub use transfer::Transfer;
