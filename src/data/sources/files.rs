use std::ffi::OsStr;
use std::fs::DirEntry;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::reader::{broken, cut, found};
use crate::data::room::reserved;
use crate::data::{Origin, Random, Source, ends, identity};
use crate::error::{Error, Result};
use crate::sys::file;

/// The largest file that is read, unless set.
const MOST: u64 = 256 << 20;

/// Whole files, one per record: images, audio.
///
/// Decoding belongs into [`LoaderBuilder::map`](crate::data::LoaderBuilder::map), which runs on
/// the workers. A file that was deleted meanwhile, or that is cut or grows while it is read, is an error of
/// its record.
///
/// *Cost*: the name's bytes and 8 more per file, and the bytes of the files that are alive.
///
/// ```
/// use memfit::data::{Files, Random, Source};
///
/// let folder = tempfile::tempdir().unwrap();
/// for name in ["b.jpg", "a.JPG", "notes.txt"] {
///     std::fs::write(folder.path().join(name), name).unwrap();
/// }
/// let images = Files::in_folder(folder.path(), &["jpg", "png"])?;
/// assert_eq!(images.len(), 2);
/// let first = images.get(0, &mut Random::of_sample(0, 0, 0))?;
/// assert_eq!((first.path.file_name().unwrap().to_str(), first.bytes.len()), (Some("a.JPG"), 5));
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Files {
    folder: PathBuf,
    /// All names, one after the other: a path of its own for each would be three times as much.
    names: Vec<u8>,
    ends: Vec<u64>,
    most: u64,
    behind: Behind,
}

/// What becomes of a file's pages in the page cache once it was read.
#[derive(Clone, Copy, Debug)]
enum Behind {
    Keep,
    Drop,
}

/// A file's bytes.
#[derive(Clone, Debug)]
pub struct FileBytes {
    /// The file.
    pub path: PathBuf,
    /// Its number in the source, for what else is known of it: a label.
    pub index: u64,
    /// What it has.
    pub bytes: Vec<u8>,
}

impl Files {
    /// These files, in this order; they are looked at when they are read.
    pub fn of<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Self {
        Self::named(PathBuf::new(), paths.into_iter().map(|path| path.as_ref().as_os_str().to_owned()))
    }

    /// The files of a folder whose extension is one of these, in whatever case, sorted by name;
    /// all its files where no extension is given. Folders in it, and links to folders, are left out.
    ///
    /// # Errors
    /// [`Error::Io`] for a folder that cannot be read, [`Error::Data`] for one without such a file.
    pub fn in_folder(folder: impl AsRef<Path>, extensions: &[&str]) -> Result<Self> {
        let folder = folder.as_ref();
        let failed = |source| Error::Io { action: "reading", path: folder.to_owned(), source };
        let mut names = Vec::new();
        for entry in folder.read_dir().map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            if has_extension(&name, extensions) && !is_folder(&entry).map_err(failed)? {
                names.push(name);
            }
        }
        if names.is_empty() {
            let no_file = match extensions {
                [] => "it has no file".to_owned(),
                some => format!("it has no file with an extension of {some:?}"),
            };
            return Err(broken(folder, no_file));
        }
        names.sort_unstable();
        Ok(Self::named(folder.to_owned(), names))
    }

    fn named(folder: PathBuf, list: impl IntoIterator<Item = std::ffi::OsString>) -> Self {
        let (mut names, mut ends) = (Vec::new(), Vec::new());
        for name in list {
            names.extend_from_slice(name.as_bytes());
            ends.push(names.len() as u64);
        }
        Self { folder, names, ends, most: MOST, behind: Behind::Keep }
    }

    /// A file with more bytes is an error of its record, before they are read; 256 MiB unless set.
    pub fn at_most(mut self, bytes: u64) -> Self {
        self.most = bytes;
        self
    }

    /// Drops each file's pages from the page cache once it was read.
    pub fn drop_behind(mut self) -> Self {
        self.behind = Behind::Drop;
        self
    }

    /// The path of a file; `None` beyond the last.
    pub fn path(&self, index: u64) -> Option<PathBuf> {
        Some(self.folder.join(self.name(usize::try_from(index).ok()?)?))
    }

    fn name(&self, index: usize) -> Option<&Path> {
        let name = ends::part(&self.ends, index)?;
        let name = self.names.get(name.start as usize..name.end as usize)?;
        Some(Path::new(OsStr::from_bytes(name)))
    }

    fn read(&self, path: &Path) -> Result<Vec<u8>> {
        let failed = |action| move |source| Error::Io { action, path: path.to_owned(), source };
        let open = file::open_data(path).map_err(failed("opening"))?;
        let len = open.metadata().map_err(failed("reading"))?.len();
        if len > self.most {
            let allowed = self.most;
            return Err(Error::data(format!("it has {len} bytes, where Files::at_most allows {allowed}")));
        }
        let mut bytes = reserved(len as usize)?;
        let there = (&open).take(len).read_to_end(&mut bytes).map_err(failed("reading"))? as u64;
        if there < len {
            return Err(cut(there, len));
        }
        // What another process appends meanwhile would be missing without a word.
        if (&open).take(1).read_to_end(&mut Vec::new()).map_err(failed("reading"))? > 0 {
            return Err(Error::data(format!(
                "it goes on after the {len} bytes that it had when it was opened"
            )));
        }
        if matches!(self.behind, Behind::Drop) {
            file::drop_cached(&open, 0, 0);
        }
        Ok(bytes)
    }
}

/// Whether it is a folder, or a link to one. A link to nothing is an error of its record, as a file that was
/// deleted.
fn is_folder(entry: &DirEntry) -> io::Result<bool> {
    let kind = entry.file_type()?;
    if kind.is_symlink() {
        return Ok(entry.path().metadata().is_ok_and(|target| target.is_dir()));
    }
    Ok(kind.is_dir())
}

fn has_extension(name: &OsStr, extensions: &[&str]) -> bool {
    let extension = Path::new(name).extension();
    extensions.is_empty()
        || extension.is_some_and(|extension| extensions.iter().any(|one| extension.eq_ignore_ascii_case(one)))
}

impl Source for Files {
    type Sample = FileBytes;

    fn len(&self) -> u64 {
        self.ends.len() as u64
    }

    fn get(&self, index: u64, _: &mut Random) -> Result<FileBytes> {
        let path = found(self.path(index), self.len())?;
        let bytes = self.read(&path)?;
        Ok(FileBytes { path, index, bytes })
    }

    fn origin(&self, index: u64) -> Origin {
        Origin { file: self.path(index).map(Into::into), record: Some(index), offset: None }
    }

    fn order(&self) -> u64 {
        identity::of_files((0..self.ends.len()).filter_map(|index| self.name(index)))
    }
}
