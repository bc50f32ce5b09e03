//! `Loader` beside PyTorch's `DataLoader`: samples a second, memory, and what a training step beside
//! it feels.

mod same;
mod table;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::Options;
use super::measure::{Spread, WARM_UP, median, spread};
use super::resident::{Resident, highest_while};
use super::setup::{Setup, output};
use super::side::Side;
use crate::problem::{Problem, Result};
use crate::scratch::Scratch;
use same::Apart;

const WORKERS: [usize; 2] = [0, 2];
/// How long memory is watched, on either side, in whole epochs.
const WATCHED: Duration = Duration::from_secs(3);
/// Fewer looks than this are no peak.
const LOOKS: usize = 20;
/// Pairs of the training step: it is short, and its goal is within a fiftieth.
const STEP_PAIRS: usize = 61;

/// A kind of data and what it is held to.
#[derive(Clone, Copy, Debug)]
struct Data {
    /// Of the files.
    name: &'static str,
    /// What memfit's side calls it, where that reads the files in another way.
    ours: &'static str,
    words: &'static str,
    /// Tokens of the file, or pictures.
    count: u64,
    /// How often an epoch has each sample.
    repeat: u64,
    /// Samples of a batch.
    batch: u64,
    /// Samples a second over the faster PyTorch's, at least.
    speed: f64,
    /// How far the two sides' numbers may be apart.
    tolerance: Apart,
    /// Pairs of a training step beside it; 0 where none is measured.
    step_pairs: usize,
}

const TOKENS: Data = Data {
    name: "tokens",
    ours: "tokens",
    words: "tokens",
    count: 1 << 25,
    repeat: 1,
    batch: 32,
    speed: 5.0,
    tolerance: Apart { mean: 0.0, most: 0.0 },
    step_pairs: STEP_PAIRS,
};
/// By choice, where nobody cuts the file.
const MAPPED_TOKENS: Data = Data { ours: "tokens-mapped", words: "tokens, mapped", step_pairs: 0, ..TOKENS };
const PICTURES: Data = Data {
    name: "images",
    ours: "images",
    words: "pictures",
    count: 256,
    repeat: 2,
    batch: 32,
    speed: 2.0,
    // Just above what two decoders and two ways to round a resized pixel give.
    tolerance: Apart { mean: 0.01, most: 0.1 },
    step_pairs: STEP_PAIRS,
};
/// A micro-batch of a model that hardly fits: what a loader holds beside its batches shows.
const FEW_PICTURES: Data = Data { words: "pictures by 4", batch: 4, step_pairs: 0, ..PICTURES };
const DATA: [Data; 4] = [TOKENS, MAPPED_TOKENS, PICTURES, FEW_PICTURES];

/// What `--strategy` can name.
pub fn names() -> Vec<&'static str> {
    let mut names = DATA.map(|data| data.name).to_vec();
    names.dedup();
    names
}

/// One side with so many workers.
struct Lane {
    memfit: bool,
    workers: usize,
    side: Side,
    /// Seconds of an epoch.
    times: Vec<f64>,
    samples: f64,
    extra: Resident,
}

/// What came of one kind of data.
struct Measured {
    data: Data,
    rows: Vec<Row>,
    difference: Apart,
    step: Step,
}

/// One side with so many workers, measured.
#[derive(Clone, Copy, Debug)]
struct Row {
    memfit: bool,
    workers: usize,
    /// Samples a second over the faster PyTorch's.
    speed: Spread,
    extra: Resident,
}

/// A training step beside loading, as the bench prints it.
#[derive(Debug, Default)]
struct Step {
    ratio: f64,
    shown: String,
    others: Vec<String>,
}

pub fn section(setup: &Setup, options: &Options) -> Result<String> {
    setup.need("the section data", "pillow", "PIL")?;
    // In memory, as the system's folder for temporary files may be, a file's pages are none of a file.
    let scratch = Scratch::in_folder(setup.target(), "peers-data")?;
    let files = Files { setup, program: setup.built("loader")?, folder: scratch.path() };
    let mut all = Vec::new();
    for data in DATA {
        if options.strategy.as_deref().is_none_or(|only| only == data.name) {
            files.write(&data)?;
            let measured = measured(&files, data, options.pairs)?;
            eprint!("{}", table::rows(&measured));
            all.push(measured);
        }
    }
    Ok(table::page(&all, options.pairs))
}

fn measured(files: &Files<'_>, data: Data, pairs: usize) -> Result<Measured> {
    let each = [true, false].into_iter().flat_map(|memfit| WORKERS.map(|workers| (memfit, workers)));
    // Each side alone: of pages that several sides have, each would count as its share only.
    let mut extras = Vec::new();
    for (memfit, workers) in each {
        extras.push((memfit, workers, extra(files.side(&data, memfit, workers)?)?));
    }
    let mut lanes = Vec::new();
    for (memfit, workers, extra) in extras {
        let side = files.side(&data, memfit, workers)?;
        lanes.push(Lane { memfit, workers, side, times: Vec::new(), samples: 0.0, extra });
    }
    let difference = difference(files, &data, &mut lanes)?;
    for round in 0..WARM_UP + pairs {
        let mut order: Vec<&mut Lane> = lanes.iter_mut().collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for lane in order {
            let (seconds, samples) = epoch(&mut lane.side)?;
            lane.times.push(seconds);
            lane.samples = samples;
        }
    }
    same_samples(&lanes)?;
    let rows = rows(&lanes);
    drop(lanes);
    let step = if data.step_pairs == 0 { Step::default() } else { step(files, &data)? };
    Ok(Measured { data, rows, difference, step })
}

fn rows(lanes: &[Lane]) -> Vec<Row> {
    let times: Vec<_> = lanes.iter().map(|lane| (lane.memfit, lane.times.clone())).collect();
    let rows = lanes.iter().zip(speeds(&times));
    rows.map(|(lane, speed)| Row { memfit: lane.memfit, workers: lane.workers, speed, extra: lane.extra })
        .collect()
}

/// Samples a second over the faster PyTorch's, pair by pair, of memfit's times and of PyTorch's.
fn speeds(times: &[(bool, Vec<f64>)]) -> Vec<Spread> {
    let middle = |times: &[f64]| median(times.iter().skip(WARM_UP).copied().collect());
    let theirs = times.iter().filter(|(memfit, _)| !memfit).map(|(_, times)| times);
    let faster = theirs.min_by(|a, b| middle(a).total_cmp(&middle(b)));
    let faster = faster.map_or(&[][..], Vec::as_slice);
    times.iter().map(|(_, times)| spread(faster, times)).collect()
}

fn same_samples(lanes: &[Lane]) -> Result<()> {
    match lanes.iter().all(|lane| lane.samples == lanes[0].samples) {
        true => Ok(()),
        false => Err(Problem::new("the sides' epochs have not as many samples")),
    }
}

/// What is resident at most over epochs of some seconds beyond what was before the loader was made.
fn extra(mut side: Side) -> Result<Resident> {
    let process = side.id();
    let before = Resident::of_tree(process);
    if before == Resident::default() {
        return Err(Problem::new("/proc has no smaps_rollup: the section data runs on Linux only"));
    }
    let (ran, seen) = highest_while(process, |_| {
        let start = Instant::now();
        while start.elapsed() < WATCHED {
            epoch(&mut side)?;
        }
        Ok(())
    });
    let () = ran?;
    enough(seen.looks)?;
    Ok(seen.highest.beyond(before))
}

/// Refuses a peak that was hardly looked for.
fn enough(looks: usize) -> Result<()> {
    match looks >= LOOKS {
        true => Ok(()),
        false => Err(Problem::new(format!(
            "memory was looked at {looks} times in {} s, at least {LOOKS} are needed: the machine is too busy",
            WATCHED.as_secs()
        ))),
    }
}

/// Seconds and samples of one.
fn epoch(side: &mut Side) -> Result<(f64, f64)> {
    side.ask("epoch", |answer| {
        let (seconds, samples) = answer.trim().split_once(' ')?;
        Some((seconds.parse().ok()?, samples.parse().ok()?))
    })
}

/// How far the two sides' first batches are apart; refuses what is not the same work.
fn difference(files: &Files<'_>, data: &Data, lanes: &mut [Lane]) -> Result<Apart> {
    let mut batches = Vec::new();
    for memfit in [true, false] {
        let path = files.folder.join(format!("first-{memfit}"));
        let Some(lane) = lanes.iter_mut().find(|lane| lane.memfit == memfit) else { continue };
        let ask = format!("first {}", path.display());
        lane.side.ask(&ask, |answer| answer.trim().parse::<u64>().ok())?;
        batches.push(fs::read(&path).map_err(|error| Problem::io("read", &path, &error))?);
    }
    // A label has 64 bits. Of tokens all is whole numbers.
    let whole = if data.name == PICTURES.name { 8 * data.batch as usize } else { usize::MAX };
    let apart = match &batches[..] {
        [ours, theirs] => Apart::of(ours, theirs, whole),
        _ => None,
    };
    match apart {
        Some(apart) if apart.is_within(data.tolerance) => Ok(apart),
        Some(apart) => {
            let (words, tolerance) = (data.words, data.tolerance);
            Err(Problem::new(format!("the two sides' {words} differ by {apart}, more than {tolerance}")))
        }
        None => Err(Problem::new(format!("the two sides' {} have other labels or tokens", data.words))),
    }
}

fn step(files: &Files<'_>, data: &Data) -> Result<Step> {
    let mut command = Command::new(&files.program);
    command.args(["training", data.name]).arg(files.of(data)).arg(data.step_pairs.to_string());
    let printed = output(&mut command)?;
    parse_step(&printed)
        .ok_or_else(|| Problem::new(format!("the bench `loader` printed no ratio: {printed}")))
}

/// `tokens: 1.010 (1.000–1.020) of the time with data in memory`, and other lines.
fn parse_step(printed: &str) -> Option<Step> {
    let mut step = Step::default();
    for line in printed.lines() {
        match line.strip_suffix(" of the time with data in memory").and_then(|line| line.split_once(": ")) {
            Some((_, shown)) => {
                step.ratio = shown.split_whitespace().next()?.parse().ok()?;
                step.shown = shown.to_owned();
            }
            None => step.others.push(line.to_owned()),
        }
    }
    (!step.shown.is_empty()).then_some(step)
}

/// The data of both sides.
struct Files<'a> {
    setup: &'a Setup,
    /// The bench `loader`.
    program: PathBuf,
    folder: &'a Path,
}

impl Files<'_> {
    fn of(&self, data: &Data) -> PathBuf {
        self.folder.join(data.name)
    }

    /// Pictures are written by Pillow: there is no encoder on our side.
    fn write(&self, data: &Data) -> Result<()> {
        let (path, count) = (self.of(data), data.count.to_string());
        if data.name == "tokens" {
            let mut command = Command::new(&self.program);
            return output(command.arg("tokens").arg(&path).arg(count)).map(drop);
        }
        fs::create_dir_all(&path).map_err(|error| Problem::io("create", &path, &error))?;
        let mut command = self.setup.script("loader.py");
        output(command.args(["--data", data.name, "--make", &count, "--path"]).arg(&path)).map(drop)
    }

    fn side(&self, data: &Data, memfit: bool, workers: usize) -> Result<Side> {
        let (path, repeat, count) = (self.of(data), data.repeat.to_string(), workers.to_string());
        let batch = data.batch.to_string();
        let (name, mut command) = if memfit {
            let mut command = Command::new(&self.program);
            command.args(["serve", data.ours]).arg(&path).args([&count, &repeat, &batch]);
            ("memfit", command)
        } else {
            let mut command = self.setup.script("loader.py");
            command
                .args(["--data", data.name, "--workers", &count, "--repeat", &repeat])
                .args(["--batch", &batch, "--path"])
                .arg(&path);
            ("PyTorch", command)
        };
        Side::start(format!("{name}, {} with {count} workers", data.words), &mut command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_are_over_the_faster_of_pytorchs() {
        let lane = |memfit, workers, time: f64| {
            let times = [&[9.0; WARM_UP][..], &[time; 3]].concat();
            (memfit, workers, times)
        };
        let lanes = [lane(true, 0, 0.5), lane(true, 2, 0.25), lane(false, 0, 1.0), lane(false, 2, 3.0)];
        let speeds: Vec<f64> = speeds(&lanes.map(|(memfit, _, times)| (memfit, times)))
            .iter()
            .map(|speed| speed.median)
            .collect();
        assert_eq!(speeds, [2.0, 4.0, 1.0, 1.0 / 3.0]);
    }

    #[test]
    fn a_peak_that_was_hardly_looked_for_is_refused() {
        assert!(enough(LOOKS).is_ok());
        assert!(enough(LOOKS - 1).unwrap_err().to_string().contains("looked at 19 times"));
    }

    #[test]
    fn each_name_is_there_once() {
        assert_eq!(names(), ["tokens", "images"]);
    }

    #[test]
    fn the_benchs_lines_are_a_ratio_and_others() {
        let step =
            parse_step("tokens: 1.010 (1.000–1.020) of the time with data in memory\na step takes 20 ms\n")
                .unwrap();
        assert_eq!((step.ratio, &step.shown[..], step.others.len()), (1.01, "1.010 (1.000–1.020)", 1));
        assert!(parse_step("nothing").is_none());
    }
}
