//! Readers of records that come one after another: lines, rows of a CSV.
//!
//! `input` is one file's bytes, decompressed; `inputs` the files of an epoch; `course` where a
//! stream stands among them. `split`, and `table` by `pieces`, cut records out for `lines` and `csv`;
//! `interface` is what these two have in common. A `part` has some of another's records.

mod compressed;
mod course;
mod csv;
mod fields;
mod input;
mod inputs;
mod interface;
mod line;
mod lines;
mod part;
mod pieces;
mod row;
mod split;
mod table;

pub use csv::Csv;
pub use fields::{Fields, numbers};
pub use line::{Line, json};
pub use lines::Lines;
pub use part::Part;
pub use row::Row;
