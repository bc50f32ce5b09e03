//! Parts of a wheel, unpacked and checked.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

use super::pip::PYTHON;
use super::wheels::Package;
use crate::problem::{Problem, Result};
use crate::progress::Progress;

const UNPACK: &str = include_str!("unpack.py");

pub enum Unpacked {
    /// A line `size path` for each file.
    Files(String),
    /// Why; fetching it again may help.
    DamagedWheel(String),
}

/// Unpacks the package's parts of `wheel` into `folder`, each file checked against the wheel's own
/// digests. Files that are there already are not replaced.
pub fn unpack(package: &Package, wheel: &Path, folder: &Path) -> Result<Unpacked> {
    let failed = |error| Problem::new(format!("`{PYTHON}` does not run: {error}"));
    let mut child = Command::new(PYTHON)
        .args(["-I", "-c", UNPACK])
        .args([wheel, folder])
        .args(package.parts.iter().flat_map(|(from, to)| [from, to]))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut progress = Progress::new(format!("unpacking {}", package.name));
    let lines = child.stdout.take().map(|out| read_lines(out, &mut progress));
    let mut log = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        let _ = stderr.read_to_string(&mut log);
    }
    let status = child.wait().map_err(failed)?;
    let log = log.trim();
    progress.finish(if status.success() { "checked" } else { "failed" });
    match status.code() {
        Some(0) => Ok(Unpacked::Files(lines.unwrap_or_default())),
        Some(3) => Ok(Unpacked::DamagedWheel(log.to_owned())),
        Some(4) => Err(Problem::new(format!("cannot unpack {}: {log}", package.name))),
        _ => Err(Problem::new(format!("unpacking was ended by {status}: run again"))),
    }
}

/// Shows the progress lines and collects `size path` of the others.
fn read_lines(stdout: impl Read, progress: &mut Progress) -> String {
    let mut files = String::new();
    for line in BufReader::new(stdout).lines().map_while(std::io::Result::ok) {
        if let Some(file) = line.strip_prefix("file ") {
            let _ = writeln!(files, "{file}");
        } else if let Some((done, total)) =
            line.strip_prefix("progress ").and_then(|rest| rest.split_once(' '))
        {
            progress.update(done.parse().unwrap_or(0), total.parse().unwrap_or(0));
        }
    }
    files
}
