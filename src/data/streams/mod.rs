//! Readers of records that come one after another: lines, rows of a CSV.
//!
//! `input` is one file's bytes, decompressed; `inputs` the files of an epoch; `course` where a
//! stream stands among them. `lines` and `csv` cut records out; a `part` has some of another's.

mod compressed;
mod course;
mod csv;
mod fields;
mod input;
mod inputs;
mod line;
mod lines;
mod part;
mod row;
mod split;

pub use csv::Csv;
pub use fields::{Fields, numbers};
pub use line::{Line, json};
pub use lines::Lines;
pub use part::Part;
pub use row::Row;
