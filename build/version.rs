//! The version of a libtorch, read from its headers. Shared by `build.rs` and xtask.

use std::fmt;
use std::fs;
use std::path::Path;

/// Where releases keep the three version macros, newest layout first, relative to `include/`.
const HEADERS: [&str; 3] =
    ["torch/headeronly/version.h", "torch/csrc/api/include/torch/version.h", "torch/version.h"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl Version {
    /// The version that the libtorch under `include` states, or `None` where no header does.
    pub fn of_headers(include: &Path) -> Option<Self> {
        HEADERS
            .iter()
            .filter_map(|header| fs::read_to_string(include.join(header)).ok())
            .find_map(|text| Self::parse_header(&text))
    }

    /// Reads `TORCH_VERSION_{MAJOR,MINOR,PATCH}` from the text of a `version.h`.
    pub fn parse_header(text: &str) -> Option<Self> {
        Some(Self {
            major: macro_value(text, "TORCH_VERSION_MAJOR")?,
            minor: macro_value(text, "TORCH_VERSION_MINOR")?,
            patch: macro_value(text, "TORCH_VERSION_PATCH")?,
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The number that `#define name number` gives.
fn macro_value(text: &str, name: &str) -> Option<u32> {
    text.lines().find_map(|line| {
        let mut words = line.trim_start().strip_prefix('#')?.split_whitespace();
        (words.next() == Some("define") && words.next() == Some(name))
            .then(|| words.next()?.parse().ok())
            .flatten()
    })
}
