//! The manifest: what a snapshot consists of, with sizes and checksums, and its scalars.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::extras::{is_plain, script_file};
use super::layout::{MODEL, OPTIMIZER, TRAINING};
use super::unique::Unique;
use crate::error::Error;
use crate::state::Value;
use crate::step::Position;

/// The manifest's file.
pub(super) const FILE: &str = "manifest.json";
/// What the `format` key says.
const FORMAT: &str = "memfit snapshot";
/// The version that is written, and the only one that is read.
const VERSION: u64 = 1;
/// Longer ones are not read.
pub(super) const LONGEST: u64 = 100 << 20;

/// Refuses to write what would not be read.
pub(super) fn check_length(what: &str, bytes: u64) -> Result<(), Error> {
    if bytes <= LONGEST {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("{what} of {bytes} bytes"),
        place: format!("in a snapshot, where {LONGEST} are read,"),
        remedy: "save long texts and names elsewhere, or as tensors".to_owned(),
    })
}

const HEAD: &str = "{\"crc32\":\"";
const AFTER_HEAD: &str = "\",\n";

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    format: String,
    version: u64,
    /// The version of memfit that wrote it.
    pub(super) written_by: String,
    /// Higher than that of every snapshot that was in the folder before.
    pub(super) sequence: u64,
    pub(super) position: At,
    /// What it was scored with.
    pub(super) loss: Option<Scalar>,
    pub(super) files: Unique<FileEntry>,
    pub(super) tensors: Unique<TensorEntry>,
    pub(super) scalars: Unique<Scalar>,
    /// Further names of tied tensors in the model's file.
    pub(super) aliases: Unique<String>,
    /// TorchScript archives: name and file.
    pub(super) scripts: Unique<String>,
    /// Names of the user's entries, empty ones too.
    pub(super) entries: Vec<String>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct At {
    steps: u64,
    windows: u64,
    micro_batches: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileEntry {
    pub(super) bytes: u64,
    pub(super) crc32: u32,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TensorEntry {
    pub(super) file: String,
    pub(super) key: String,
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    /// Where the tensor was dense in another order; the file always has it contiguous.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) strides: Option<Vec<u64>>,
    pub(super) crc32: u32,
}

/// A scalar to the bit; JSON has no infinity and no NaN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Scalar {
    Float(f64),
    /// 16 hexadecimal digits.
    FloatBits(String),
    Int(i64),
    Text(String),
}

impl Scalar {
    pub(super) fn of(value: &Value) -> Option<Self> {
        Some(match value {
            Value::Tensor(_) => return None,
            Value::Float(number) => Self::float(*number),
            Value::Int(number) => Self::Int(*number),
            Value::Text(text) => Self::Text(text.clone()),
        })
    }

    pub(super) fn float(number: f64) -> Self {
        if number.is_finite() {
            Self::Float(number)
        } else {
            Self::FloatBits(format!("{:016x}", number.to_bits()))
        }
    }

    pub(super) fn value(&self) -> Option<Value> {
        Some(match self {
            Self::Float(number) => Value::Float(*number),
            Self::FloatBits(digits) if digits.len() == 16 => {
                Value::Float(f64::from_bits(u64::from_str_radix(digits, 16).ok()?))
            }
            Self::FloatBits(_) => return None,
            Self::Int(number) => Value::Int(*number),
            Self::Text(text) => Value::Text(text.clone()),
        })
    }
}

impl At {
    /// Each count with its name.
    pub(super) fn counts(self) -> [(&'static str, u64); 3] {
        let Self { steps, windows, micro_batches } = self;
        [("steps", steps), ("windows", windows), ("micro_batches", micro_batches)]
    }
}

impl From<Position> for At {
    fn from(position: Position) -> Self {
        let Position { steps, windows, micro_batches } = position;
        Self { steps, windows, micro_batches }
    }
}

impl From<At> for Position {
    fn from(at: At) -> Self {
        let At { steps, windows, micro_batches } = at;
        Self { steps, windows, micro_batches }
    }
}

impl Manifest {
    pub(super) fn new(position: Position, sequence: u64, loss: Option<f64>) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            written_by: env!("CARGO_PKG_VERSION").to_owned(),
            sequence,
            position: position.into(),
            loss: loss.map(Scalar::float),
            files: Unique::default(),
            tensors: Unique::default(),
            scalars: Unique::default(),
            aliases: Unique::default(),
            scripts: Unique::default(),
            entries: Vec::new(),
        }
    }

    pub(super) fn loss(&self) -> Option<f64> {
        match self.loss.as_ref()?.value()? {
            Value::Float(loss) => Some(loss),
            _ => None,
        }
    }

    /// What is wrong with the files' names: there are the three of tensors and the scripts'.
    pub(super) fn file_problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut known = BTreeSet::from([MODEL, OPTIMIZER, TRAINING]);
        for (name, file) in &self.scripts.0 {
            if is_plain(name) && *file == script_file(name) {
                known.insert(file);
            } else {
                problems.push(format!("script {name:?} cannot be in {file:?}"));
            }
        }
        let unknown = self.files.0.keys().filter(|name| !known.contains(name.as_str()));
        problems.extend(unknown.map(|name| format!("{name:?} is no name of a file here")));
        let missing = known.iter().filter(|name| !self.files.0.contains_key(**name));
        problems.extend(missing.map(|name| format!("{name} is not among the files")));
        problems
    }

    /// The file's text: the first line has the checksum of all that follows it.
    pub(super) fn text(&self) -> Result<String, serde_json::Error> {
        let json = serde_json::to_string_pretty(self)?;
        let body = json.strip_prefix('{').unwrap_or(&json).trim_start_matches('\n');
        Ok(format!("{HEAD}{:08x}{AFTER_HEAD}{body}", crc32fast::hash(body.as_bytes())))
    }

    /// Reads the file's text.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(bytes).map_err(|_| "the manifest is not UTF-8".to_owned())?;
        let body = checked_body(text)?;
        let json = format!("{{{body}");
        check_version(&json)?;
        serde_json::from_str(&json).map_err(|error| format!("the manifest cannot be read: {error}"))
    }
}

/// What stands behind the checksum, if that is right.
fn checked_body(text: &str) -> Result<&str, String> {
    let after = text.strip_prefix(HEAD).ok_or("the manifest does not begin with its checksum")?;
    let (digits, rest) = after.split_at_checked(8).ok_or("the manifest is cut off")?;
    let body = rest.strip_prefix(AFTER_HEAD).ok_or("the manifest does not begin with its checksum")?;
    let found = format!("{:08x}", crc32fast::hash(body.as_bytes()));
    if found == digits {
        Ok(body)
    } else {
        Err(format!("the manifest's checksum is {digits}, its text has {found}"))
    }
}

fn check_version(json: &str) -> Result<(), String> {
    #[derive(Deserialize)]
    struct Head {
        format: String,
        version: u64,
    }
    let head: Head =
        serde_json::from_str(json).map_err(|error| format!("the manifest cannot be read: {error}"))?;
    if head.format != FORMAT {
        return Err(format!("the manifest is of format {:?}, wanted {FORMAT:?}", head.format));
    }
    if head.version != VERSION {
        let problem = "the manifest is of version";
        return Err(format!("{problem} {}, this memfit reads version {VERSION}", head.version));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_float_comes_back_to_the_bit() {
        let odd = [0.1, -0.0, f64::MIN_POSITIVE / 3.0, f64::MAX, f64::INFINITY, f64::NEG_INFINITY];
        let payload = f64::from_bits(0x7ff8_0000_dead_beef);
        for number in odd.into_iter().chain([payload, -f64::NAN]) {
            let json = serde_json::to_string(&Scalar::float(number)).unwrap();
            let back: Scalar = serde_json::from_str(&json).unwrap();
            let Some(Value::Float(back)) = back.value() else { panic!("{json}") };
            assert_eq!(back.to_bits(), number.to_bits(), "{json}");
        }
    }

    #[test]
    fn text_that_changes_anywhere_is_refused() {
        let text = Manifest::new(Position::default(), 1, Some(f64::NAN)).text().unwrap();
        assert!(Manifest::parse(text.as_bytes()).is_ok());
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 0x20;
            assert!(Manifest::parse(&bytes).is_err(), "byte {at}");
            assert!(Manifest::parse(&text.as_bytes()[..at]).is_err(), "cut at {at}");
        }
    }

    #[test]
    fn a_key_twice_is_refused() {
        let twice = r#"{"a":{"bytes":1,"crc32":2},"a":{"bytes":1,"crc32":2}}"#;
        let error = serde_json::from_str::<Unique<FileEntry>>(twice).unwrap_err();
        assert!(error.to_string().contains("`a` stands twice"), "{error}");
    }
}
