//! Records in any order: out of files that stay files, out of memory, out of other sources.
//! `docs/data-sources.md` is their manual.

mod array_file;
mod concat;
mod files;
mod memory;
mod npy;
mod npy_header;
mod reader;
mod slice;
mod tensors;
mod token_rows;
mod tokens;
mod touched;
mod zip;

pub use array_file::ArrayFile;
pub use concat::Concat;
pub use files::{FileBytes, Files};
pub use memory::InMemory;
pub use npy::Npy;
pub use slice::Slice;
pub use tensors::Safetensors;
pub use token_rows::{NextToken, TokenRows};
pub use tokens::{Token, Tokens};
pub use zip::Zip;
