//! Readers of records that come one after another: lines, rows of a CSV.
//!
//! `input` is one file's bytes, decompressed; `inputs` the files of an epoch; `course` where a
//! stream stands among them. `split`, and `rows` by `pieces`, cut records out for `lines` and `csv`;
//! `reader` is what these two have in common. A `part` has some of another's records.

mod compressed;
mod course;
mod csv;
mod fields;
mod input;
mod inputs;
mod line;
mod lines;
mod part;
mod pieces;
mod reader;
mod row;
mod rows;
mod split;

pub use csv::Csv;
pub use fields::{Fields, numbers};
pub use line::{Line, json};
pub use lines::Lines;
pub use part::Part;
pub use row::Row;
