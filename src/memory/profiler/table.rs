use std::cmp::Ordering;
use std::fmt::{self, Display, Formatter, Write};
use std::time::Duration;

use super::nest::{Figures, Operator};
use super::profile::Profile;
use crate::memory::tables::{amount, shown};

/// What a table of operators is sorted by, the most first.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SortBy {
    /// Bytes of its own; those of accelerators, where there are any.
    SelfMemory,
    /// Time on the host, of its own.
    SelfTime,
    /// Time on the host, with the operators that it called.
    TotalTime,
    /// Time on accelerators, of its own.
    SelfDeviceTime,
}

impl SortBy {
    pub(super) fn compare(self, a: &Operator, b: &Operator) -> Ordering {
        let order = match self {
            Self::SelfMemory => {
                let key = |one: &Operator| (one.own.device_memory, one.own.memory);
                key(b).cmp(&key(a))
            }
            Self::SelfTime => b.own.time.cmp(&a.own.time),
            Self::TotalTime => b.total.time.cmp(&a.total.time),
            Self::SelfDeviceTime => b.own.device_time.cmp(&a.own.device_time),
        };
        order.then_with(|| a.name.cmp(&b.name))
    }

    fn words(self) -> &'static str {
        match self {
            Self::SelfMemory => "self memory",
            Self::SelfTime => "self CPU time",
            Self::TotalTime => "CPU time",
            Self::SelfDeviceTime => "self device time",
        }
    }
}

/// Letters of an operator's name.
const NAME: usize = 50;
/// Rows of a table that `Display` writes.
const ROWS: usize = 15;

impl Profile {
    /// The first `rows` operators in an order, as a table. Columns of an accelerator are there
    /// where one was used.
    pub fn table(&self, by: SortBy, rows: usize) -> String {
        let all = self.total();
        let device = all.device_time > Duration::ZERO
            || self.operators().iter().any(|one| one.total.device_memory != 0 || one.own.device_memory != 0);
        let mut out = String::new();
        let (count, of) = (rows.min(self.operators().len()), self.operators().len());
        let _ = writeln!(out, "{count} of {of} operators, by {}", by.words());
        let _ = write!(
            out,
            "{:<NAME$}{:>8}{:>8}{:>12}{:>12}{:>13}{:>13}",
            "operator", "calls", "self %", "self CPU", "CPU total", "self memory", "memory"
        );
        if device {
            let _ = write!(out, "{:>13}{:>13}{:>14}", "self device", "device total", "self dev. mem");
        }
        out.push('\n');
        for one in self.sorted(by).into_iter().take(rows) {
            row(&mut out, one, all, device);
        }
        let _ = write!(
            out,
            "in all {} of CPU time, live bytes {}",
            span(all.time),
            if all.memory < 0 { "fell by " } else { "rose by " }
        );
        let _ = writeln!(out, "{}", amount(all.memory.unsigned_abs()));
        out
    }
}

fn row(out: &mut String, one: &Operator, all: Figures, device: bool) {
    let share = 100.0 * one.own.time.as_secs_f64() / all.time.as_secs_f64().max(f64::MIN_POSITIVE);
    let _ = write!(
        out,
        "{:<NAME$}{:>8}{share:>7.1}%{:>12}{:>12}{:>13}{:>13}",
        cut(&one.name),
        one.calls,
        span(one.own.time),
        span(one.total.time),
        signed(one.own.memory),
        signed(one.total.memory)
    );
    if device {
        let _ = write!(
            out,
            "{:>13}{:>13}{:>14}",
            span(one.own.device_time),
            span(one.total.device_time),
            signed(one.own.device_memory)
        );
    }
    out.push('\n');
}

/// A name that fits its column.
fn cut(name: &str) -> String {
    let name = shown(name);
    if name.chars().count() < NAME {
        return name;
    }
    name.chars().take(NAME - 2).chain(['…']).collect()
}

fn signed(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{}", amount(bytes.unsigned_abs()))
}

/// A time for a person, with three digits or four.
fn span(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds {
        _ if seconds >= 1.0 => format!("{seconds:.2} s"),
        _ if seconds >= 1e-3 => format!("{:.2} ms", seconds * 1e3),
        _ => format!("{:.1} µs", seconds * 1e6),
    }
}

/// The largest by memory and by time.
impl Display for Profile {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.table(SortBy::SelfMemory, ROWS))?;
        write!(f, "{}", self.table(SortBy::SelfTime, ROWS))
    }
}
