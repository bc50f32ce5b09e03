use std::sync::mpsc;

use tch::Device;

use super::lines::Lines;
use super::source::Source;
use super::*;
use crate::memory::{Pool, Resident};

/// Figures from a list; at its end the last ones again.
struct Script(Vec<Reading>);

impl Source for Script {
    fn read(&mut self) -> Reading {
        if self.0.len() > 1 { self.0.remove(0) } else { self.0[0].clone() }
    }
}

/// A moment at which so many of 1,000 bytes of RAM, and so many of a cgroup's 100, are in use.
fn moment(host: u64, group: u64) -> Reading {
    Reading {
        time: Duration::from_secs(host),
        unix: Duration::from_secs(1_000_000),
        devices: vec![DeviceReading { device: Device::Cpu, live: host, peak: host + 7, reserved: host + 1 }],
        resident: Some(Resident { anonymous: host * 2, file: 3, shared: 4 }),
        ram_total: Some(1000),
        ram_available: Some(1000 - host),
        swap_used: Some(host / 2),
        cgroup: Some(CgroupReading { usage: group + 50, page_cache: 50, limit: Some(100) }),
        warnings: Vec::new(),
    }
}

/// Warnings of a watch over figures, each with the number of its reading.
fn warned(figures: &[(u64, u64)], warn_at: f64, margin: f64) -> Vec<(usize, Pool)> {
    let readings = figures.iter().map(|(host, group)| moment(*host, *group)).collect();
    let mut watch = Watch::new(Box::new(Script(readings)), warn_at, margin);
    let looks = (0..figures.len()).map(|_| watch.look()).enumerate();
    looks.flat_map(|(at, reading)| reading.warnings.into_iter().map(move |found| (at, found.pool))).collect()
}

#[test]
fn it_warns_once_and_again_only_after_a_margin() {
    let host = |used: &[u64]| {
        let figures: Vec<(u64, u64)> = used.iter().map(|used| (*used, 0)).collect();
        warned(&figures, 0.9, 0.05).into_iter().map(|(at, _)| at).collect::<Vec<_>>()
    };
    assert_eq!(host(&[100, 899, 900, 990, 999]), [2], "nine tenths are enough, and once is");
    assert_eq!(host(&[950, 880, 950, 860, 950]), [0], "it never fell below 850");
    assert_eq!(host(&[950, 840, 899, 900]), [0, 3]);
}

#[test]
fn each_memory_is_warned_of_for_itself() {
    let figures = [(100, 10), (950, 10), (950, 95), (100, 95), (950, 10), (100, 91)];
    let expected = [(1, Pool::Host), (2, Pool::Cgroup), (4, Pool::Host), (5, Pool::Cgroup)];
    assert_eq!(warned(&figures, 0.9, 0.05), expected);
}

#[test]
fn the_share_to_warn_at_can_be_set() {
    assert_eq!(warned(&[(499, 49), (500, 49), (500, 50)], 0.5, 0.0), [(1, Pool::Host), (2, Pool::Cgroup)]);
}

#[test]
fn page_cache_does_not_warn() {
    let mut reading = moment(0, 0);
    reading.cgroup = Some(CgroupReading { usage: 99, page_cache: 60, limit: Some(100) });
    let mut watch = Watch::new(Box::new(Script(vec![reading])), 0.9, 0.05);
    assert_eq!(watch.look().warnings, []);
}

#[test]
fn figures_that_are_missing_do_not_warn() {
    let mut silent = moment(999, 99);
    (silent.ram_available, silent.cgroup) = (None, None);
    let mut empty = moment(999, 0);
    empty.ram_total = Some(0);
    let mut open = moment(0, 0);
    open.cgroup = Some(CgroupReading { usage: u64::MAX, page_cache: 0, limit: None });
    let mut watch = Watch::new(Box::new(Script(vec![silent, empty, open])), 0.9, 0.05);
    assert!((0..3).all(|_| watch.look().warnings.is_empty()));
}

#[test]
fn a_warning_is_logged_with_its_figures() {
    let logged = Logged::default();
    let texts = logged.0.clone();
    tracing::subscriber::with_default(logged, || {
        assert_eq!(warned(&[(100, 10), (950, 10), (960, 96)], 0.9, 0.05).len(), 2);
    });
    let texts = texts.lock();
    assert_eq!(texts.len(), 2, "{texts:?}");
    assert!(texts[0].contains("host memory") && texts[0].contains("950 B of 1.0 kB (95 %)"), "{texts:?}");
    assert!(texts[1].contains("cgroup") && texts[1].contains("96 B of 100 B (96 %)"), "{texts:?}");
}

#[test]
fn the_summary_has_the_highest_of_each_figure() {
    let mut summary = MonitorSummary::default();
    for reading in [moment(300, 40), moment(800, 90), moment(500, 20)] {
        summary.add(&reading);
    }
    assert_eq!((summary.readings, summary.time), (3, Duration::from_secs(500)));
    let device = DeviceReading { device: Device::Cpu, live: 800, peak: 807, reserved: 801 };
    assert_eq!(summary.devices, [device]);
    assert_eq!((summary.resident, summary.ram_available), (Some(1600), Some(200)));
    assert_eq!((summary.swap_used, summary.cgroup_used), (Some(400), Some(90)));
}

#[test]
fn only_the_newest_warnings_are_kept() {
    let mut summary = MonitorSummary::default();
    for at in 0..WARNINGS as u64 + 3 {
        let mut reading = moment(0, 0);
        let time = Duration::from_secs(at);
        reading.warnings = vec![Warning { pool: Pool::Host, used: at, total: 1, time }];
        summary.add(&reading);
    }
    assert_eq!(summary.warnings.len(), WARNINGS);
    assert_eq!(summary.warnings[0].used, 3);
}

#[test]
fn a_thread_hands_on_what_its_source_says() {
    let (sender, readings) = mpsc::channel();
    let script = Script(vec![moment(100, 10), moment(950, 10), moment(200, 10)]);
    let config = Monitor::every(Duration::from_micros(100)).on_reading(move |reading| {
        let _ = sender.send(reading.clone());
    });
    let monitor = config.start_from(|| Box::new(script)).unwrap();
    let seen: Vec<Reading> = readings.iter().take(3).collect();
    assert_eq!(seen.iter().map(|reading| reading.devices[0].live).collect::<Vec<_>>(), [100, 950, 200]);
    assert_eq!(seen[1].warnings.len(), 1);
    assert_eq!(monitor.warnings(), seen[1].warnings);
    assert_eq!(monitor.latest().devices[0].live, 200);
    let summary = monitor.stop().unwrap();
    assert_eq!((summary.devices[0].live, summary.ram_available), (950, Some(50)));
    assert_eq!(summary.warnings, seen[1].warnings);
}

#[test]
fn a_function_that_panics_is_called_no_more_and_the_monitor_goes_on() {
    let (sender, calls) = mpsc::channel();
    let mut watch = Watch::new(Box::new(Script(vec![moment(1, 1)])), 0.9, 0.05).telling(
        None,
        Some(Box::new(move |_| {
            let _ = sender.send(());
            std::panic::resume_unwind(Box::new("a bar that is gone"));
        })),
    );
    let reading = watch.look();
    let told = watch.tell(&reading);
    assert!(
        matches!(&told, Err(Error::Panic { message, .. }) if message == "a bar that is gone"),
        "{told:?}"
    );
    let reading = watch.look();
    watch.tell(&reading).unwrap();
    assert_eq!(calls.iter().count(), 1);
}

#[test]
fn a_line_has_every_figure_as_a_whole_number() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lines");
    let mut reading = moment(950, 95);
    reading.time = Duration::from_micros(1_250_000);
    reading.warnings = vec![Warning { pool: Pool::Cgroup, used: 95, total: 100, time: reading.time }];
    Lines::open(&path).unwrap().write(&reading).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let expected = "{\"seconds\":1.25,\"unix_seconds\":1000000.0,\
        \"devices\":[{\"device\":\"cpu\",\"live\":950,\"peak\":957,\"reserved\":951}],\
        \"resident\":{\"anonymous\":1900,\"file\":3,\"shared\":4},\
        \"ram_total\":1000,\"ram_available\":50,\"swap_used\":475,\
        \"cgroup\":{\"usage\":145,\"page_cache\":50,\"limit\":100},\
        \"warnings\":[{\"pool\":\"cgroup\",\"used\":95,\"total\":100}]}\n";
    assert_eq!(text, expected);
}

#[test]
fn figures_that_are_missing_are_null() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lines");
    let mut reading = moment(1, 1);
    (reading.resident, reading.ram_total, reading.swap_used, reading.cgroup) = (None, None, None, None);
    Lines::open(&path).unwrap().write(&reading).unwrap();
    let line: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    for name in ["resident", "ram_total", "swap_used", "cgroup"] {
        assert!(line[name].is_null(), "{name}");
    }
}

#[test]
fn a_line_never_joins_one_that_was_left_unfinished() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lines");
    std::fs::write(&path, "{\"seconds\":1.0}\n{\"sec").unwrap();
    for _ in 0..2 {
        Lines::open(&path).unwrap().write(&moment(1, 1)).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert!([0, 2, 3].iter().all(|at| serde_json::from_str::<serde_json::Value>(lines[*at]).is_ok()));
}

/// A subscriber that keeps the texts of warnings.
#[derive(Default)]
struct Logged(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Logged {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn Debug) {
                self.0.push_str(&format!("{}: {value:?}; ", field.name()));
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().push(text.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}
