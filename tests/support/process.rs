//! The process, as the system sees it.

#[cfg(target_os = "linux")]
use std::path::Path;
use std::process::Command;

/// Anonymous memory comes in small pages while this lives: of a huge one all is resident as soon as a byte of it is
/// used, and the kernel may make one of small ones at any moment.
pub struct SmallPages {
    #[cfg(target_os = "linux")]
    before: libc::c_int,
}

#[cfg(target_os = "linux")]
impl SmallPages {
    pub fn hold() -> Self {
        let none: libc::c_ulong = 0;
        // SAFETY: numbers only.
        let before = unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, none, none, none, none) };
        Self::set(1);
        Self { before }
    }

    fn set(off: libc::c_ulong) {
        let none: libc::c_ulong = 0;
        // SAFETY: numbers only. A kernel without huge pages refuses, and has none.
        unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, off, none, none, none) };
    }
}

#[cfg(target_os = "linux")]
impl Drop for SmallPages {
    fn drop(&mut self) {
        if self.before == 0 {
            Self::set(0);
        }
    }
}

#[cfg(not(target_os = "linux"))]
impl SmallPages {
    pub fn hold() -> Self {
        Self {}
    }
}

fn kibibytes(line: &str, name: &str) -> Option<u64> {
    let number = line.strip_prefix(name)?.strip_prefix(':')?.trim().strip_suffix(" kB")?;
    Some(number.parse::<u64>().unwrap() << 10)
}

/// Anonymous bytes, in memory or swapped out. They are counted page by page where the kernel can: its own counters
/// are exact on few processors only (`memory::Resident`).
pub fn anonymous() -> u64 {
    let Ok(text) = std::fs::read_to_string("/proc/self/smaps_rollup") else {
        return memfit::memory::resident().unwrap().anonymous;
    };
    let of = |name: &str| text.lines().find_map(|line| kibibytes(line, name)).unwrap();
    of("Anonymous") + of("Swap")
}

/// Bytes of a file's mappings by a line of `smaps`. The process' figures count its program and libraries too, of
/// which pages come when code runs for the first time.
#[cfg(target_os = "linux")]
pub fn of_mappings(file: &Path, figure: &str) -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let path = file.canonicalize().unwrap();
    let mut lines = smaps.lines();
    let mut bytes = 0;
    while lines.any(|line| line.ends_with(path.to_str().unwrap())) {
        bytes += lines.find_map(|line| kibibytes(line, figure)).unwrap();
    }
    bytes
}

/// Whether this is a process in which the test of this name runs alone. Anywhere else it runs one, and is `false`
/// once that passed.
pub fn is_alone(test: &str) -> bool {
    const ALONE: &str = "MEMFIT_TEST_ALONE";
    if std::env::var_os(ALONE).is_some_and(|name| name == test) {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.args([test, "--exact", "--nocapture"]).env(ALONE, test).output().unwrap();
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let passed = output.status.success() && out.contains("1 passed");
    assert!(passed, "{test} alone: {}\n{out}\n{error}", output.status);
    false
}
