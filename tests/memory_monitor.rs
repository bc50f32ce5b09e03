//! The monitor: what it sees, what it writes, how it ends, and what it leaves alone.

mod support;

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use memfit::memory::{self, Monitor, MonitorSummary, Reading, ResidentChart};
use memfit::rng::Generators;
use memfit::{Error, Result};
use serde_json::Value;
use support::serial;
use support::waiting::{ends, until, until_others_wait};
use tch::{Device, Kind, Tensor};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);
const SOON: Duration = Duration::from_millis(1);
const NEVER: Duration = Duration::from_secs(3600);

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'), "the last line is whole");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn it_sees_live_bytes_come_and_go() {
    let _guard = serial();
    memory::reset_peak(Device::Cpu).unwrap();
    let monitor = Monitor::every(SOON).start().unwrap();
    let before = monitor.latest().devices[0];
    assert_eq!((before.device, before.live), (Device::Cpu, support::live()));
    let held = Tensor::zeros([1_000_000], CPU);
    until("a reading", || monitor.latest().devices[0].live == before.live + 4_000_000);
    drop(held);
    until("a reading", || monitor.latest().devices[0].live == before.live);
    let peak = memory::stats(Device::Cpu).unwrap().peak;
    assert_eq!(monitor.latest().devices[0].peak, peak);
    let summary = monitor.stop().unwrap();
    assert_eq!((summary.devices[0].live, summary.devices[0].peak), (before.live + 4_000_000, peak));
}

/// A peak between two readings is the allocator's own, so it is in the summary.
#[test]
fn a_peak_between_readings_is_not_lost() {
    let _guard = serial();
    memory::reset_peak(Device::Cpu).unwrap();
    let monitor = Monitor::every(NEVER).start().unwrap();
    let live = support::live();
    drop(Tensor::zeros([1_000_000], CPU));
    let summary = monitor.stop().unwrap();
    assert_eq!((summary.readings, summary.devices[0].live), (2, live));
    assert_eq!(summary.devices[0].peak, live + 4_000_000);
}

#[test]
#[cfg(target_os = "linux")]
fn its_figures_are_the_system_s() {
    let _guard = serial();
    // Other processes come and go: what lies between two reports that agree is compared.
    let agree = |a: u64, b: u64| a.abs_diff(b) < 256 << 20;
    let mut between = None;
    until("two reports agree", || {
        let before = memory::system_report().unwrap();
        let monitor = Monitor::every(NEVER).start().unwrap();
        let after = memory::system_report().unwrap();
        let agree =
            agree(before.ram.available, after.ram.available) && agree(before.swap.used, after.swap.used);
        between = agree.then_some((monitor, after));
        agree
    });
    let (monitor, report) = between.unwrap();
    let near = |a: u64, b: u64| a.abs_diff(b) < 1 << 30;
    let reading = monitor.latest();
    let resident = memory::resident().unwrap();
    assert_eq!(reading.ram_total, Some(report.ram.total));
    assert!(near(reading.ram_available.unwrap(), report.ram.available), "{reading:?}");
    assert!(near(reading.swap_used.unwrap(), report.swap.used));
    assert!(reading.resident.unwrap().anonymous.abs_diff(resident.anonymous) < 64 << 20);
    assert_eq!(reading.cgroup.map(|group| group.limit), report.cgroup.map(|group| group.limit));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    assert!(now.saturating_sub(reading.unix) < Duration::from_secs(60), "{reading:?}");
    monitor.stop().unwrap();
}

#[test]
fn the_file_has_a_line_per_reading() {
    let _guard = serial();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory.jsonl");
    let (sender, readings) = mpsc::channel();
    let config = Monitor::every(SOON).write_json_lines(&path).on_reading(move |reading| {
        let _ = sender.send(reading.clone());
    });
    let monitor = config.start().unwrap();
    until("a reading", || monitor.summary().readings >= 5);
    let summary = monitor.stop().unwrap();
    let (readings, lines): (Vec<Reading>, _) = (readings.iter().collect(), lines(&path));
    assert_eq!((readings.len(), lines.len()), (summary.readings as usize, summary.readings as usize));
    for (reading, line) in readings.iter().zip(&lines) {
        assert_eq!(line["seconds"].as_f64(), Some(reading.time.as_micros() as f64 / 1e6));
        assert_eq!(line["unix_seconds"].as_f64(), Some(reading.unix.as_micros() as f64 / 1e6));
        assert_eq!(line["devices"][0]["device"], "cpu");
        assert_eq!(line["devices"][0]["live"].as_u64(), Some(reading.devices[0].live));
        assert_eq!(line["devices"][0]["peak"].as_u64(), Some(reading.devices[0].peak));
        assert_eq!(line["devices"][0]["reserved"].as_u64(), Some(reading.devices[0].reserved));
        assert_eq!(line["resident"]["anonymous"].as_u64(), reading.resident.map(|own| own.anonymous));
        assert_eq!(line["ram_available"].as_u64(), reading.ram_available);
        assert_eq!(line["swap_used"].as_u64(), reading.swap_used);
        assert_eq!(line["cgroup"]["usage"].as_u64(), reading.cgroup.map(|group| group.usage));
    }
    let times: Vec<Duration> = readings.iter().map(|reading| reading.time).collect();
    assert_eq!(times[0], Duration::ZERO, "where a run begins in a file of several");
    assert!(times.is_sorted(), "{times:?}");
}

#[test]
fn a_file_and_its_readings_are_one_picture() {
    let _guard = serial();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("memory.jsonl");
    let (send, readings) = mpsc::channel();
    let monitor = Monitor::every(Duration::from_millis(5))
        .write_json_lines(&file)
        .on_reading(move |reading| send.send(reading.clone()).unwrap())
        .start()
        .unwrap();
    let kept = Tensor::ones([4 << 20], CPU);
    until("a reading", || monitor.latest().devices[0].live >= 16 << 20 && monitor.summary().readings > 3);
    drop(kept);
    monitor.stop().unwrap();
    let readings: Vec<_> = readings.into_iter().collect();
    let chart = || ResidentChart::new("an epoch").budget(8 << 20).above_start();
    let by_file = chart().run_of_file("run", &file).unwrap();
    assert_eq!(by_file.svg(), chart().run("run", &readings).svg());
    for ending in ["svg", "png"] {
        let picture = folder.path().join(format!("picture.{ending}"));
        by_file.save(&picture).unwrap();
        assert!(std::fs::metadata(picture).unwrap().len() > 1000);
    }
}

#[test]
fn lines_are_there_while_it_runs() {
    let _guard = serial();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory.jsonl");
    let monitor = Monitor::every(NEVER).write_json_lines(&path).start().unwrap();
    until("a reading", || !lines(&path).is_empty());
    monitor.stop().unwrap();
    assert_eq!(lines(&path).len(), 2);
    Monitor::every(NEVER).write_json_lines(&path).start().unwrap().stop().unwrap();
    assert_eq!(lines(&path).len(), 4, "a second run writes behind the first");
}

#[test]
fn a_file_that_cannot_be_made_is_told_at_once() {
    let _guard = serial();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("no/such/folder/memory.jsonl");
    let started = Monitor::every(NEVER).write_json_lines(&path).start();
    assert!(matches!(&started, Err(Error::Io { path: told, .. }) if *told == path), "{started:?}");
}

/// Every write to `/dev/full` fails as on a full disk.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_ends_no_monitor_and_is_told_by_stop() {
    let _guard = serial();
    let (sender, readings) = mpsc::channel();
    let config = Monitor::every(SOON).write_json_lines("/dev/full").on_reading(move |_| {
        let _ = sender.send(());
    });
    let monitor = config.start().unwrap();
    assert_eq!(readings.iter().take(5).count(), 5, "it goes on");
    let seen: MonitorSummary = monitor.summary();
    assert!(seen.readings >= 5 && !seen.devices.is_empty());
    let stopped = monitor.stop();
    let full = std::io::ErrorKind::StorageFull;
    assert!(matches!(&stopped, Err(Error::Io { source, .. }) if source.kind() == full), "{stopped:?}");
    assert!(stopped.unwrap_err().to_string().contains("/dev/full"));
}

#[test]
fn a_function_that_panics_is_told_by_stop() {
    let _guard = serial();
    let config = Monitor::every(SOON).on_reading(|_| std::panic::resume_unwind(Box::new("no bar")));
    let monitor = config.start().unwrap();
    until("a reading", || monitor.summary().readings >= 3);
    let stopped = monitor.stop();
    assert!(matches!(&stopped, Err(Error::Panic { message, .. }) if message == "no bar"), "{stopped:?}");
}

/// A monitor that waits between readings, and what tells that its thread is gone.
fn waiting() -> (Monitor, mpsc::Receiver<()>) {
    let (sender, called) = mpsc::channel();
    let config = Monitor::every(NEVER).on_reading(move |_| {
        let _ = sender.send(());
    });
    let monitor = config.start().unwrap();
    called.recv().unwrap();
    until_others_wait();
    (monitor, called)
}

#[test]
fn neither_drop_nor_stop_waits_for_the_interval() {
    let _guard = serial();
    let (monitor, called) = waiting();
    ends("the drop of a monitor", || drop(monitor));
    assert_eq!(called.try_recv(), Err(mpsc::TryRecvError::Disconnected), "the thread is gone");
    let (monitor, called) = waiting();
    let summary = ends("a monitor's stop", || monitor.stop().unwrap());
    assert_eq!(summary.readings, 2, "one at the start and one at the end");
    assert_eq!(called.iter().count(), 1);
}

/// No clock has a time as far away.
#[test]
fn an_interval_without_an_end_is_no_panic() {
    let _guard = serial();
    let monitor = Monitor::every(Duration::MAX).start().unwrap();
    assert_eq!(monitor.stop().unwrap().readings, 2);
}

#[test]
fn a_monitor_can_be_dropped_by_what_it_calls() {
    let _guard = serial();
    let (sender, monitors) = mpsc::channel::<Monitor>();
    let (done, ended) = mpsc::channel();
    let config = Monitor::every(SOON).on_reading(move |_| {
        if let Ok(monitor) = monitors.try_recv() {
            drop(monitor);
            let _ = done.send(());
        }
    });
    sender.send(config.start().unwrap()).unwrap();
    ended.recv_timeout(Duration::from_secs(60)).unwrap();
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let _guard = serial();
    let refused = |config: memory::MonitorConfig| match config.start() {
        Err(Error::Config { setting, .. }) => setting,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(Monitor::every(Duration::ZERO)), "Monitor::every");
    for share in [0.0, -0.1, 1.1, f64::NAN, f64::INFINITY] {
        assert_eq!(refused(Monitor::every(NEVER).warn_at(share)), "warn_at", "{share}");
    }
    for margin in [-0.1, 0.9, 2.0, f64::NAN] {
        assert_eq!(refused(Monitor::every(NEVER).margin(margin)), "margin", "{margin}");
    }
    let all: Result<Monitor> = Monitor::every(NEVER).warn_at(1.0).margin(0.0).start();
    all.unwrap().stop().unwrap();
}

/// A machine whose RAM is in use to a millionth warns at that share.
#[test]
#[cfg(target_os = "linux")]
fn memory_in_use_is_warned_of_once() {
    let _guard = serial();
    let monitor = Monitor::every(SOON).warn_at(1e-6).margin(0.0).start().unwrap();
    until("a reading", || monitor.summary().readings >= 5);
    let warnings = monitor.warnings();
    let host = warnings.iter().filter(|warning| warning.pool == memory::Pool::Host);
    assert_eq!(host.count(), 1, "{warnings:?}");
    assert_eq!(warnings[0].total, memory::system_report().unwrap().ram.total);
    assert_eq!(monitor.stop().unwrap().warnings.len(), warnings.len());
}

#[test]
fn it_takes_no_counted_memory_and_draws_no_number() {
    let _guard = serial();
    let before = memory::stats(Device::Cpu).unwrap();
    let generators = Generators::capture(Device::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let config = Monitor::every(SOON).write_json_lines(folder.path().join("lines")).on_reading(|_| {});
    let monitor = config.start().unwrap();
    until("a reading", || monitor.summary().readings >= 20);
    monitor.stop().unwrap();
    assert_eq!(memory::stats(Device::Cpu).unwrap(), before);
    assert!(!generators.moved_since());
}

/// A loop by hand and the same one under a monitor: same bits, same peak.
#[test]
fn training_under_a_monitor_is_the_same() {
    let _guard = serial();
    let run = |watched: bool| {
        tch::manual_seed(7);
        let scope = memory::PeakScope::new(Device::Cpu).unwrap();
        let start = support::live();
        let monitor = watched.then(|| Monitor::every(SOON).start().unwrap());
        let mut w = Tensor::randn([300, 300], CPU).set_requires_grad(true);
        for _ in 0..20 {
            let loss = w.matmul(&Tensor::randn([300, 300], CPU)).tanh().square().mean(Kind::Float);
            loss.backward();
            let gradient = w.grad();
            tch::no_grad(|| {
                let _ = w.g_sub_(&gradient);
            });
            w.zero_grad();
        }
        let readings = monitor.map(|monitor| monitor.stop().unwrap().readings);
        (w.detach(), scope.peak() - start, readings)
    };
    let (plain, bytes, _) = run(false);
    let (watched, watched_bytes, readings) = run(true);
    assert!(plain.equal(&watched) && readings.is_some_and(|readings| readings > 2), "{readings:?}");
    assert_eq!(bytes, watched_bytes);
}

#[test]
fn monitors_may_go_to_another_thread() {
    let _guard = serial();
    fn sendable<T: Send + Sync + 'static>() {}
    sendable::<Monitor>();
    fn movable<T: Send + 'static>() {}
    movable::<memory::MonitorConfig>();
}
