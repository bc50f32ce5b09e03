//! What a process and those that it started keep in memory.

use std::fs;
use std::ops::Add;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Between two looks: a look walks the process's page tables, which takes milliseconds.
const EVERY: Duration = Duration::from_millis(10);

/// Proportional set sizes: a page that several processes have is shared out between them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// Bytes of all.
    pub all: u64,
    /// Without the pages of files, which the system can drop.
    pub kept: u64,
}

impl Add for Resident {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { all: self.all + other.all, kept: self.kept + other.kept }
    }
}

impl Resident {
    /// A process and all below it.
    pub fn of_tree(process: u32) -> Self {
        // A process that has ended meanwhile has nothing.
        let own = fs::read_to_string(format!("/proc/{process}/smaps_rollup")).unwrap_or_default();
        children(process).into_iter().map(Self::of_tree).fold(parse(&own), Self::add)
    }

    /// What is more than `before`.
    pub fn beyond(self, before: Self) -> Self {
        let (all, kept) = (self.all.saturating_sub(before.all), self.kept.saturating_sub(before.kept));
        Self { all, kept }
    }

    fn higher(self, other: Self) -> Self {
        Self { all: self.all.max(other.all), kept: self.kept.max(other.kept) }
    }
}

/// What was seen of a process and those below it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub highest: Resident,
    pub looks: usize,
}

/// The highest of a process and those below it, while `body` runs; it can see how often it was looked.
pub fn highest_while<R>(process: u32, body: impl FnOnce(&AtomicUsize) -> R) -> (R, Seen) {
    let (done, count) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let looks = scope.spawn(|| {
            let mut highest = Resident::default();
            while !done.load(Ordering::Acquire) {
                highest = highest.higher(Resident::of_tree(process));
                count.fetch_add(1, Ordering::Release);
                std::thread::sleep(EVERY);
            }
            highest
        });
        let result = body(&count);
        done.store(true, Ordering::Release);
        let highest = looks.join().unwrap_or_default();
        (result, Seen { highest, looks: count.load(Ordering::Acquire) })
    })
}

/// By the parents that all processes name: not every kernel lists children.
fn children(process: u32) -> Vec<u32> {
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.filter(|id| parent(*id) == Some(process)).collect()
}

/// The second field behind the name, which is in brackets and may have some in it.
fn parent(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

fn parse(rollup: &str) -> Resident {
    let field = |name: &str| {
        let line = rollup.lines().find_map(|line| line.strip_prefix(name));
        let kilobytes: Option<u64> = line.and_then(|line| line.trim_end_matches("kB").trim().parse().ok());
        kilobytes.unwrap_or(0) * 1024
    };
    let (anonymous, shared) = (field("Pss_Anon:"), field("Pss_Shmem:"));
    Resident { all: field("Pss:"), kept: anonymous + shared }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::process::{Child, Command, Stdio};
    use std::time::Instant;

    #[test]
    fn file_pages_are_told_from_those_that_are_kept() {
        let text = "Rss: 90 kB\nPss:   60 kB\nPss_Anon:  10 kB\nPss_File: 30 kB\nPss_Shmem:  20 kB\n";
        assert_eq!(parse(text), Resident { all: 60 * 1024, kept: 30 * 1024 });
        assert_eq!(parse("").beyond(parse(text)), Resident::default());
    }

    /// A process that waits for its input, and a child of it that waits too and ends with it.
    fn tree() -> Child {
        let words = "sleep 60 & read line; kill $!";
        let (input, output) = (Stdio::piped(), Stdio::null());
        Command::new("sh").args(["-c", words]).stdin(input).stdout(output).spawn().unwrap()
    }

    fn wait_until(done: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(60);
        while !done() {
            assert!(Instant::now() < until, "it never came");
            std::thread::sleep(EVERY);
        }
    }

    #[test]
    fn a_tree_has_more_than_its_root() {
        if !Path::new("/proc/self/smaps_rollup").is_file() {
            println!("skipped: there is no /proc/self/smaps_rollup");
            return;
        }
        let mut root = tree();
        let id = root.id();
        // Until it has begun its own program, the child is its parent's copy.
        let begun = |child: &u32| {
            fs::read_to_string(format!("/proc/{child}/comm")).is_ok_and(|name| name.trim() == "sleep")
        };
        wait_until(|| children(id).iter().any(begun));
        let own = parse(&fs::read_to_string(format!("/proc/{id}/smaps_rollup")).unwrap());
        let ((), seen) = highest_while(id, |looks| wait_until(|| looks.load(Ordering::Acquire) > 2));
        let below: Vec<_> = children(id).into_iter().map(Resident::of_tree).collect();
        root.wait().unwrap();
        assert_eq!(below.len(), 1);
        assert!(below[0].kept > 0 && own.kept > 0, "{below:?} {own:?}");
        assert!(seen.highest.kept >= own.kept + below[0].kept / 2, "{seen:?} {own:?} {below:?}");
        assert!(seen.looks > 2);
        assert_eq!(Resident::of_tree(id), Resident::default(), "one that ended has nothing");
    }
}
