//! Waiting for what is meant, instead of for a time in which it should have happened.

use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Longer than any machine takes that is not asleep.
const LONG: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_millis(2);

/// Waits until something is so.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < LONG, "it never came: {what}");
        std::thread::sleep(SOON);
    }
}

/// Fails where something does not end.
pub fn ends<T: Send + 'static>(what: &str, body: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || sender.send(body()));
    ended.recv_timeout(LONG).unwrap_or_else(|error| panic!("{what}: {error}"))
}

/// Waits until every other thread of the process waits for something and none is about to go on.
#[cfg(target_os = "linux")]
pub fn until_others_wait() {
    let mut before = None;
    until("all other threads wait", || {
        let now = others_waits();
        let still = now.is_some() && now == before;
        before = now;
        still
    });
}

/// How often each other thread has waited so far, where now all of them do.
#[cfg(target_os = "linux")]
fn others_waits() -> Option<Vec<(String, u64)>> {
    // SAFETY: no arguments.
    let own = unsafe { libc::gettid() }.to_string();
    let mut waits = Vec::new();
    for entry in std::fs::read_dir("/proc/self/task").unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name == own {
            continue;
        }
        // One that has ended meanwhile may have woken another.
        let status = std::fs::read_to_string(entry.path().join("status")).ok()?;
        let of = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        if !of("State:")?.starts_with('S') {
            return None;
        }
        // Where it is not counted, twice the same states have to do.
        waits.push((name, of("voluntary_ctxt_switches:").map_or(0, |count| count.parse().unwrap())));
    }
    Some(waits)
}

/// Elsewhere nothing tells, so this is a time in which it should have happened.
#[cfg(not(target_os = "linux"))]
pub fn until_others_wait() {
    std::thread::sleep(Duration::from_millis(100));
}

/// Waits until other threads of the process have worked for some milliseconds from now on.
pub fn until_others_work() {
    let start = others_time();
    until("another thread works", || others_time() > start + Duration::from_millis(10));
}

/// Processor time of the other threads.
fn others_time() -> Duration {
    let of = |clock: libc::clockid_t| {
        // SAFETY: all zeroes is a value of this plain struct.
        let mut time: libc::timespec = unsafe { std::mem::zeroed() };
        // SAFETY: `time` is writable for the call.
        assert_eq!(unsafe { libc::clock_gettime(clock, &mut time) }, 0);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let own = of(libc::CLOCK_THREAD_CPUTIME_ID);
    of(libc::CLOCK_PROCESS_CPUTIME_ID) - own
}
