//! One side of a comparison: a process that trains a step when told to.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::problem::{Problem, Result};

/// Equal on both sides: two threads.
const THREADS: [(&str, &str); 2] = [("OMP_NUM_THREADS", "2"), ("MKL_NUM_THREADS", "2")];

#[derive(Debug)]
pub struct Side {
    name: String,
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

/// What one step took and gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    pub seconds: f64,
    pub peak: u64,
    pub loss: f64,
}

impl Side {
    /// Starts the process and waits until its model is ready.
    pub fn start(name: String, command: &mut Command) -> Result<Self> {
        let command = command.envs(THREADS).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child =
            command.spawn().map_err(|error| Problem::new(format!("{name} does not start: {error}")))?;
        let input = child.stdin.take();
        let Some(output) = child.stdout.take().map(BufReader::new) else {
            return Err(Problem::new(format!("{name} has no output")));
        };
        let mut side = Self { name, child, input, output };
        match side.line()?.starts_with("ready") {
            true => Ok(side),
            false => Err(side.broken("did not say that it is ready")),
        }
    }

    /// Trains one step.
    pub fn step(&mut self) -> Result<Step> {
        self.ask("step", parse)
    }

    /// Tells it a line, and reads its answer.
    pub fn ask<R>(&mut self, words: &str, parse: impl Fn(&str) -> Option<R>) -> Result<R> {
        let told = match &mut self.input {
            Some(input) => writeln!(input, "{words}").and_then(|()| input.flush()),
            None => Ok(()),
        };
        told.map_err(|error| self.broken(&error.to_string()))?;
        let line = self.line()?;
        parse(&line).ok_or_else(|| self.broken(&format!("answered `{}`", line.trim())))
    }

    /// The process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(0) => Err(self.broken("ended")),
            Ok(_) => Ok(line),
            Err(error) => Err(self.broken(&error.to_string())),
        }
    }

    fn broken(&self, what: &str) -> Problem {
        Problem::new(format!("the side {} {what}; what it wrote is above", self.name))
    }
}

/// Without input the process ends by itself.
impl Drop for Side {
    fn drop(&mut self) {
        self.input = None;
        let _ = self.child.wait();
    }
}

fn parse(line: &str) -> Option<Step> {
    let mut words = line.split_whitespace();
    let step = Step {
        seconds: words.next()?.parse().ok()?,
        peak: words.next()?.parse().ok()?,
        loss: words.next()?.parse().ok()?,
    };
    words.next().is_none().then_some(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_three_numbers() {
        assert_eq!(parse("0.5 1000 2.25\n"), Some(Step { seconds: 0.5, peak: 1000, loss: 2.25 }));
        for line in ["", "0.5 1000", "0.5 x 2", "0.5 1000 2.25 4"] {
            assert_eq!(parse(line), None, "{line}");
        }
    }

    #[test]
    fn a_side_that_ends_is_a_sentence() {
        let side = Side::start("of a test".to_owned(), &mut Command::new("true"));
        assert!(side.unwrap_err().to_string().starts_with("the side of a test ended"));
    }
}
