//! Data that never fills memory: files that stay files, records that are read ahead by threads,
//! batches of which few are alive.
//!
//! A [`Source`] has records by number, a [`Stream`] one after another; a [`Loader`] makes batches of
//! either, ahead of the training. Memory: at most `prefetch` batches are ready or in the making; one is in
//! the step and one may be looked ahead to.

mod buffers;
mod builder;
mod collate;
pub(crate) mod dtype;
mod engine;
mod feed;
mod loaded;
mod loader;
mod order;
mod origin;
mod random;
mod sample;
mod slot;
mod source;
mod sources;
mod stream;
mod stream_feed;
mod transfer;

pub use buffers::{Buffers, Rows};
pub use builder::LoaderBuilder;
pub use collate::{Collate, Stacked, Waiting, With};
pub use feed::Tail;
pub use loaded::Loaded;
pub use loader::Loader;
pub use origin::Origin;
pub use random::Random;
pub use sample::{Array, Sample};
pub use source::Source;
pub use sources::{
    ArrayFile, Concat, FileBytes, Files, InMemory, NextToken, Npy, Safetensors, Slice, Token, TokenRows,
    Tokens, Zip,
};
pub use stream::{Interrupt, Stream};
pub use stream_feed::StreamJob;
pub use transfer::Transfer;
