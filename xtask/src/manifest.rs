//! The two things that xtask has to know of `Cargo.toml`: its features and its dev profile.

use std::fs;
use std::path::Path;

use crate::problem::{Problem, Result};

/// Features that change how libtorch is found or whether anything links.
const LEFT_OUT: [&str; 3] = ["default", "doc-only", "download-libtorch"];

pub struct Manifest {
    text: String,
}

impl Manifest {
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).map_err(|error| Problem::io("read", path, &error))?;
        Ok(Self { text })
    }

    /// The names of all features that can be on together, in the order of the file.
    pub fn features(&self) -> Vec<&str> {
        let mut open = 0_i32; // lists run over several lines
        let mut names = Vec::new();
        for line in self.section("features") {
            let line = line.split('#').next().unwrap_or_default();
            if let (0, Some((name, _))) = (open, line.split_once('=')) {
                names.push(name.trim().trim_matches('"'));
            }
            open += line.matches('[').count() as i32 - line.matches(']').count() as i32;
        }
        names.retain(|name| !LEFT_OUT.contains(name));
        names
    }

    /// The lines between `[name]` and the next section.
    pub fn section(&self, name: &str) -> impl Iterator<Item = &str> {
        let header = format!("[{name}]");
        let lines = self.text.lines().skip_while(move |line| line.trim() != header).skip(1);
        lines.take_while(|line| !line.starts_with('['))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn features(text: &str) -> Vec<String> {
        let manifest = Manifest { text: text.to_owned() };
        manifest.features().into_iter().map(str::to_owned).collect()
    }

    #[test]
    fn every_feature_is_found_but_those_left_out() {
        let text = "[package]\nname = \"x\"\n\n[features]\ndefault = []\n# a comment = []\n\
                    progress = [\"dep:indicatif\"] # why\nmany = [\n    \"a\",\n    \"b = c\",\n]\n\
                    \"quoted\" = []\ndoc-only = [\"tch/doc-only\"]\n\n[dependencies]\ntch = \"1\"\n";
        assert_eq!(features(text), ["progress", "many", "quoted"]);
    }

    #[test]
    fn no_features_is_no_list() {
        assert!(features("[features]\ndefault = []\ndoc-only = []\n").is_empty());
        assert!(features("[package]\n").is_empty());
    }
}
