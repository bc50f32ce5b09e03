//! Fetching a wheel with pip, on whatever Python 3 there is.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use super::wheels::Package;
use crate::problem::{Problem, Result};
use crate::progress::Progress;

pub const PYTHON: &str = "python3";

/// Every tag that the wheels may carry: named platforms replace pip's own list of older ones.
const PLATFORMS: [&str; 6] = [
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_26_x86_64",
    "manylinux_2_25_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
];

/// Puts the wheel of `package` into `folder`, whatever the version of the Python that runs;
/// `otherwise` is what a user does who has no network.
pub fn download(package: &Package, folder: &Path, otherwise: &str) -> Result<()> {
    let requirement = format!("{}=={}", package.name, package.version);
    let mut command = Command::new(PYTHON);
    command.args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:"]);
    command.args(["--python-version", "3.12", "--implementation", "cp"]);
    command.args(PLATFORMS.iter().flat_map(|platform| ["--platform", platform]));
    // The wheel stays in our own cache: a second copy in pip's would cost half a gigabyte.
    command.args(["--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "off"]);
    command.arg("--dest").arg(folder).arg(&requirement);
    // pip's temporary files beside the wheel: it is renamed, not copied, and can be measured.
    command.env("TMPDIR", folder).stdin(Stdio::null()).stdout(Stdio::null());

    let mut progress = Progress::new(format!("fetching {} {}", package.name, package.version));
    let finished = watch(&mut command, || progress.update(bytes_in(folder), package.bytes))?;
    match finished {
        Ok(()) => progress.finish("fetched"),
        Err(log) => {
            progress.finish("failed");
            return Err(Problem::new(sentence(&requirement, &log, otherwise)));
        }
    }
    Ok(())
}

/// Runs pip, calling `tick` while it works. The inner error is what it wrote to its log.
pub fn watch(command: &mut Command, mut tick: impl FnMut()) -> Result<std::result::Result<(), String>> {
    let failed = |error| Problem::new(format!("pip does not run: {error}"));
    let mut child = command.stderr(Stdio::piped()).spawn().map_err(failed)?;
    let log = log_of(&mut child);
    let status = loop {
        tick();
        match child.try_wait().map_err(failed)? {
            Some(status) => break status,
            None => thread::sleep(Duration::from_millis(100)),
        }
    };
    let log = log.join().unwrap_or_default();
    Ok(if status.success() { Ok(()) } else { Err(log) })
}

fn log_of(child: &mut Child) -> thread::JoinHandle<String> {
    let stderr = child.stderr.take();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stderr) = stderr {
            let _ = stderr.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// One sentence for what pip says in many lines.
pub fn sentence(requirement: &str, log: &str, otherwise: &str) -> String {
    let has = |words: &[&str]| words.iter().any(|word| log.contains(word));
    if has(&["No space left on device"]) {
        return format!("no room on the disk for {requirement}: make room and run again");
    }
    if has(&[
        "NewConnectionError",
        "NameResolutionError",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "ProxyError",
        "connection broken",
        "Max retries exceeded",
    ]) {
        return format!(
            "no network: pip cannot reach its package index for {requirement}; connect (or set \
             pip's proxy or index) and run again, or {otherwise}"
        );
    }
    let error = log.lines().rev().find_map(|line| line.strip_prefix("ERROR: "));
    let said = error.or_else(|| log.lines().rev().find(|line| !line.trim().is_empty()));
    format!(
        "pip cannot fetch {requirement} (it says: {}); see what `{PYTHON} -m pip config list` \
         shows and run again, or {otherwise}",
        said.unwrap_or("nothing").trim(),
    )
}

fn bytes_in(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(data) if data.is_dir() => bytes_in(&entry.path()),
            Ok(data) => data.len(),
            Err(_) => 0,
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unreachable_index_is_no_network() {
        let log = "WARNING: Retrying (Retry(total=0)) after connection broken by \
                   'NewConnectionError(...)'\nERROR: No matching distribution found for torch";
        let text = sentence("torch==2.13.0", log, "wait");
        assert!(text.starts_with("no network") && text.ends_with("run again, or wait"), "{text}");
    }

    #[test]
    fn a_full_disk_is_said() {
        let log = "ERROR: Could not install: [Errno 28] No space left on device\n";
        assert!(sentence("torch==2.13.0", log, "wait").starts_with("no room on the disk"));
    }

    #[test]
    fn anything_else_quotes_pips_last_error() {
        let log = "ERROR: first\nERROR: No matching distribution found for x==1\n[notice] hi\n";
        let text = sentence("x==1", log, "wait");
        assert!(text.contains("(it says: No matching distribution found for x==1)"), "{text}");
        assert!(sentence("x==1", "", "wait").contains("it says: nothing"));
    }

    #[test]
    fn the_log_of_a_failing_command_is_kept() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo why >&2; exit 1"]);
        // Else a shell has more to say on some machines.
        command.env("LC_ALL", "C").env_remove("LD_PRELOAD");
        assert_eq!(watch(&mut command, || {}).unwrap(), Err("why\n".to_owned()));
    }
}
