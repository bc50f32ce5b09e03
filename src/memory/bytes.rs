use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// A number of bytes that reads `250MiB` and writes `262.1 MB`.
///
/// ```
/// let budget: memfit::memory::Bytes = "250MiB".parse()?;
/// assert_eq!(budget.get(), 250 << 20);
/// assert_eq!(budget.to_string(), "262.1 MB");
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl Bytes {
    /// The number.
    pub fn get(self) -> u64 {
        self.0
    }
}

impl From<u64> for Bytes {
    fn from(bytes: u64) -> Self {
        Self(bytes)
    }
}

impl From<Bytes> for u64 {
    fn from(bytes: Bytes) -> Self {
        bytes.0
    }
}

impl FromStr for Bytes {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        parse_bytes(text).map(Self)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} MB", self.0 as f64 / 1e6)
    }
}

/// Bytes from text: a number, whole or with a decimal point, and a unit.
///
/// Units: B (or none), kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024),
/// in any case; a space may stand before the unit. Part bytes are dropped.
///
/// # Errors
/// [`Error::Config`] for another unit, a negative number, no number, and more than 2⁶⁴ − 1.
pub fn parse_bytes(text: &str) -> Result<u64> {
    exact_bytes(text.trim()).map_err(|problem| {
        Error::config("bytes", format!("`{text}` {problem}; write it as 250MiB, 250 MB, 1.5GB or 4096"))
    })
}

fn exact_bytes(text: &str) -> Result<u64, &'static str> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, name) = text.split_at(digits);
    if text.starts_with('-') {
        return Err("is negative");
    }
    let unit = unit(name.trim_start()).ok_or("has an unknown unit")?;
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && part.is_empty() || part.contains('.') {
        return Err("is not a number of bytes");
    }
    // In u128 and without floating point: 18.446744073709551615 EB would not survive it.
    let whole: u128 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| "is too large")? };
    let part = &part[..part.len().min(18)];
    let tenths: u128 =
        if part.is_empty() { 0 } else { part.parse().map_err(|_| "is not a number of bytes")? };
    let fraction = tenths * unit / 10u128.pow(part.len() as u32);
    let bytes =
        whole.checked_mul(unit).and_then(|bytes| bytes.checked_add(fraction)).ok_or("is too large")?;
    u64::try_from(bytes).map_err(|_| "is too large")
}

/// Bytes of a unit, in the spellings of users and of libtorch.
pub(super) fn unit(name: &str) -> Option<u128> {
    Some(match name.to_ascii_lowercase().as_str() {
        "" | "b" | "byte" | "bytes" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return None,
    })
}

/// Bytes in the unit that suits them, for texts.
pub(super) fn readable(bytes: u64) -> String {
    let scaled = |unit: f64| bytes as f64 / unit;
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", scaled(1e3)),
        1_000_000..1_000_000_000 => format!("{:.1} MB", scaled(1e6)),
        1_000_000_000.. => format!("{:.1} GB", scaled(1e9)),
    }
}
