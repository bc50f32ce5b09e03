//! A command to run, which can also be shown so that a reader can repeat it.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::problem::{Problem, Result};

#[derive(Clone, Debug)]
pub struct Invocation {
    program: OsString,
    args: Vec<OsString>,
    set: Vec<(String, OsString)>,
    unset: Vec<String>,
    folder: PathBuf,
}

impl Invocation {
    pub fn new(program: impl Into<OsString>, folder: &Path) -> Self {
        let folder = folder.to_owned();
        Self { program: program.into(), args: vec![], set: vec![], unset: vec![], folder }
    }

    /// The cargo that runs this xtask, in `folder`.
    pub fn cargo(folder: &Path) -> Self {
        Self::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()), folder)
    }

    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    pub fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.set.push((name.to_owned(), value.into()));
        self
    }

    pub fn env_remove(mut self, name: &str) -> Self {
        self.unset.push(name.to_owned());
        self
    }

    /// Runs it to its end.
    pub fn run(&self) -> Result<()> {
        let status = self.command().status().map_err(|error| self.unstartable(&error))?;
        if status.success() {
            return Ok(());
        }
        Err(Problem::new(format!("it ended with {status}; to repeat it: {self}")))
    }

    /// Runs it to its end and gives what it prints; its errors are shown.
    pub fn output(&self) -> Result<String> {
        let ran = self.command().stderr(Stdio::inherit()).output();
        let ran = ran.map_err(|error| self.unstartable(&error))?;
        if ran.status.success() {
            return Ok(String::from_utf8_lossy(&ran.stdout).into_owned());
        }
        Err(Problem::new(format!("it ended with {}; to repeat it: {self}", ran.status)))
    }

    /// Becomes it, so that Ctrl-C reaches it alone. Returns only where that fails.
    pub fn become_it(&self) -> Result<()> {
        #[cfg(unix)]
        {
            use std::os::unix::process::CommandExt;
            Err(self.unstartable(&self.command().exec()))
        }
        #[cfg(not(unix))]
        self.run()
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args).current_dir(&self.folder);
        command.envs(self.set.iter().map(|(name, value)| (name, value)));
        for name in &self.unset {
            command.env_remove(name);
        }
        command
    }

    fn unstartable(&self, error: &std::io::Error) -> Problem {
        Problem::new(format!("{} does not start: {error}", self.program.display()))
    }
}

impl fmt::Display for Invocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cd {} &&", quoted(self.folder.as_os_str()))?;
        if !self.unset.is_empty() {
            f.write_str(" env")?;
        }
        for name in &self.unset {
            write!(f, " -u {name}")?;
        }
        for (name, value) in &self.set {
            write!(f, " {name}={}", quoted(value))?;
        }
        // A reader's shell finds cargo by its name.
        let program = Path::new(&self.program);
        let program = match program.file_stem() {
            Some(stem) if stem == "cargo" => stem,
            _ => program.as_os_str(),
        };
        write!(f, " {}", quoted(program))?;
        self.args.iter().try_for_each(|arg| write!(f, " {}", quoted(arg)))
    }
}

/// As a POSIX shell takes it for one word.
fn quoted(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shown_command_can_be_pasted_into_a_shell() {
        let invocation = Invocation::new("/opt/rust/bin/cargo", Path::new("/a folder"))
            .args(["test", "--bench", "*"])
            .env("RUSTDOCFLAGS", "-D warnings")
            .env_remove("LD_LIBRARY_PATH");
        assert_eq!(
            invocation.to_string(),
            "cd '/a folder' && env -u LD_LIBRARY_PATH RUSTDOCFLAGS='-D warnings' cargo test --bench '*'"
        );
    }

    #[test]
    fn a_failing_command_says_how_to_repeat_it() {
        let problem = Invocation::new("false", Path::new("/")).run().unwrap_err();
        assert!(problem.to_string().ends_with("to repeat it: cd / && false"), "{problem}");
    }

    #[test]
    fn a_missing_program_is_a_sentence() {
        let problem = Invocation::new("no-such-program", Path::new("/")).run().unwrap_err();
        assert!(problem.to_string().starts_with("no-such-program does not start: "), "{problem}");
    }
}
