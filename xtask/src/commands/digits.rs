//! `cargo xtask digits`: 1,797 pictures of handwritten digits for the examples.
//!
//! They are the test half of "Optical Recognition of Handwritten Digits" by E. Alpaydin and
//! C. Kaynak (UCI Machine Learning Repository, 1998), under the Creative Commons licence CC BY 4.0,
//! as scikit-learn (BSD-3-Clause) carries them in its wheel.

use std::fs;
use std::path::{Path, PathBuf};

use super::Command;
use crate::libtorch::pip;
use crate::libtorch::unpack::{Unpacked, unpack};
use crate::libtorch::wheels::{Cache, Package, remove_started};
use crate::lock::Lock;
use crate::preflight;
use crate::problem::{Problem, Result};
use crate::repo::Repo;

const FILE: &str = "digits.csv.gz";

const PACKAGE: Package = Package {
    name: "scikit-learn",
    version: "1.7.2",
    bytes: 9_478_381,
    parts: &[("sklearn/datasets/data/digits.csv.gz", FILE)],
};

pub const COMMAND: Command = Command {
    name: "digits",
    args: "",
    summary: "fetch 1,797 handwritten digits (UCI, CC BY 4.0) from scikit-learn's wheel into .data",
    run,
};

fn run(repo: &Repo, args: &[String]) -> Result<()> {
    if let Some(first) = args.first() {
        return Err(Problem::Usage(format!("digits takes no `{first}`")));
    }
    let file = ready(&repo.root().join(".data"), |folder| {
        preflight::pip(Path::new(pip::PYTHON), "the data", &otherwise())?;
        Cache::at(folder.to_owned())
            .wheel(&PACKAGE, |package, into| pip::download(package, into, &otherwise()))
    })?;
    println!("the digits are in {}: a row is 64 pixels of 0 to 16, then the digit", file.display());
    Ok(())
}

/// The path of the data below `folder`; where it is not there, it is unpacked from the wheel that
/// `fetch` puts into a folder, which goes away again.
fn ready(folder: &Path, fetch: impl Fn(&Path) -> Result<PathBuf>) -> Result<PathBuf> {
    let file = folder.join(FILE);
    if file.is_file() {
        return Ok(file);
    }
    let _lock = Lock::take(&folder.join("lock"))?;
    if file.is_file() {
        return Ok(file); // another run has fetched it meanwhile
    }
    remove_started(folder, "unpacking-");
    let partial = folder.join(format!("unpacking-{}", std::process::id()));
    fs::create_dir_all(&partial).map_err(|error| Problem::io("create", &partial, &error))?;
    let unpacked = fetch(&partial).and_then(|wheel| take_out(&wheel, &partial));
    let moved = unpacked.and_then(|unpacked| {
        fs::rename(&unpacked, &file).map_err(|error| Problem::io("rename", &unpacked, &error))
    });
    let _ = fs::remove_dir_all(&partial);
    moved.map(|()| file)
}

fn take_out(wheel: &Path, folder: &Path) -> Result<PathBuf> {
    match unpack(&PACKAGE, wheel, folder)? {
        Unpacked::Files(_) => Ok(folder.join(FILE)),
        Unpacked::DamagedWheel(why) => Err(Problem::new(format!(
            "the wheel of {} {} is damaged ({why}): run again, or {}",
            PACKAGE.name,
            PACKAGE.version,
            otherwise()
        ))),
    }
}

fn otherwise() -> String {
    let (from, _) = PACKAGE.parts[0];
    format!("put {from} of any scikit-learn into .data yourself")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    /// A wheel with one row of data, and a RECORD that is right or not.
    fn wheel(folder: &Path, digest: &str) -> Result<PathBuf> {
        let make = "import base64, hashlib, sys, zipfile\n\
            file, data = 'sklearn/datasets/data/digits.csv.gz', b'0,1'\n\
            right = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()\n\
            digest = right if sys.argv[2] == 'right' else sys.argv[2]\n\
            with zipfile.ZipFile(sys.argv[1], 'w') as archive:\n\
            \x20   archive.writestr(file, data)\n\
            \x20   archive.writestr('x.dist-info/RECORD', f'{file},sha256={digest},3\\n')\n";
        let path = folder.join("scikit_learn-1.7.2-x.whl");
        let made = std::process::Command::new(pip::PYTHON).args(["-c", make]).arg(&path).arg(digest).status();
        assert!(made.unwrap().success());
        Ok(path)
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_data_is_fetched_once_and_the_wheel_goes_away() {
        let scratch = Scratch::new("digits");
        let file = ready(scratch.path(), |folder| wheel(folder, "right")).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"0,1");
        assert_eq!(names(scratch.path()), [FILE, "lock"]);
        assert_eq!(ready(scratch.path(), |_| panic!("fetched twice")), Ok(file));
    }

    #[test]
    fn what_fails_leaves_nothing_and_says_what_to_do() {
        let scratch = Scratch::new("no-digits");
        fs::create_dir(scratch.path().join("unpacking-1")).unwrap();
        let problem = ready(scratch.path(), |folder| wheel(folder, "wrong")).unwrap_err().to_string();
        assert!(problem.contains("is damaged") && problem.ends_with("into .data yourself"), "{problem}");
        assert!(ready(scratch.path(), |_| Err(Problem::new("no network"))).is_err());
        assert_eq!(names(scratch.path()), ["lock"]);
    }
}
