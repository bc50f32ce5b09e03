//! `docs/benchmarks.md`, section by section: a run that measures one leaves the others' text.

use std::fs;
use std::io;
use std::path::Path;

use crate::problem::{Problem, Result};

/// A part of the page with a run of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    Models,
    Optimizers,
    Snapshots,
    Watching,
    Data,
}

impl Section {
    pub const ALL: [Self; 5] = [Self::Models, Self::Optimizers, Self::Snapshots, Self::Watching, Self::Data];

    pub fn name(self) -> &'static str {
        match self {
            Self::Models => "models",
            Self::Optimizers => "optimizers",
            Self::Snapshots => "snapshots",
            Self::Watching => "watching",
            Self::Data => "data",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|section| section.name() == name)
    }
}

/// The sections' texts.
#[derive(Debug, Default, PartialEq)]
pub struct Page {
    sections: Vec<(Section, String)>,
}

impl Page {
    /// The page as it was; an absent one has no sections.
    pub fn read(path: &Path) -> Result<Self> {
        match fs::read_to_string(path) {
            Ok(text) => Ok(Self::parse(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(Problem::io("read", path, &error)),
        }
    }

    fn parse(text: &str) -> Self {
        let body = text.split_once(&marker("notes")).map_or(text, |(body, _)| body);
        let from = |section: Section| Some(body.split_once(&marker(section.name()))?.1);
        let until = |rest: &str| {
            let ends = Section::ALL.iter().filter_map(|section| rest.find(&marker(section.name())));
            rest[..ends.min().unwrap_or(rest.len())].trim().to_owned()
        };
        let sections = Section::ALL.into_iter();
        Self { sections: sections.filter_map(|section| Some((section, until(from(section)?)))).collect() }
    }

    /// Replaces a section, or adds it in its place.
    pub fn put(&mut self, section: Section, text: &str) {
        self.sections.retain(|(known, _)| *known != section);
        self.sections.push((section, text.trim().to_owned()));
        self.sections.sort_by_key(|(section, _)| Section::ALL.iter().position(|known| known == section));
    }

    /// Writes it between a head and notes; until that is done the old page is there.
    pub fn write(&self, path: &Path, head: &str, notes: &str) -> Result<()> {
        let new = path.with_extension("md.new");
        fs::write(&new, self.text(head, notes)).map_err(|error| Problem::io("write", &new, &error))?;
        fs::rename(&new, path).map_err(|error| Problem::io("replace", path, &error))
    }

    fn text(&self, head: &str, notes: &str) -> String {
        let mut text = format!("{}\n", head.trim());
        for (section, body) in &self.sections {
            text += &format!("\n{}\n{body}\n", marker(section.name()).trim_end());
        }
        text + &format!("\n{}\n{}\n", marker("notes").trim_end(), notes.trim())
    }
}

fn marker(name: &str) -> String {
    format!("<!-- section: {name} -->\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_measured_again_stays_as_it_was() {
        let mut page = Page::default();
        page.put(Section::Optimizers, "## O\n\nold");
        page.put(Section::Models, "## M\n\n| a | b |");
        let mut read = Page::parse(&page.text("# head", "notes"));
        assert_eq!(read, page);
        read.put(Section::Optimizers, "## O\n\nnew");
        let text = read.text("# head", "notes");
        assert!(text.contains("| a | b |") && text.contains("new") && !text.contains("old"), "{text}");
        assert!(text.find("## M") < text.find("## O"));
        assert_eq!(Page::parse("no sections"), Page::default());
    }

    #[test]
    fn a_page_that_cannot_be_read_is_not_taken_for_an_absent_one() {
        assert_eq!(Page::read(Path::new("/no/such/page.md")), Ok(Page::default()));
        assert!(Page::read(Path::new("/")).is_err());
    }
}
