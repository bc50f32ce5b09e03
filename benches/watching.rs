//! What seeing costs: a step with memory watched over the same step without, in turns. The
//! section of that name in `docs/benchmarks.md` is what this prints.

#[path = "../examples/gpt/mod.rs"]
mod gpt;
mod support;

use std::time::{Duration, Instant};

use gpt::{Config, Gpt, Recompute};
use memfit::memory::{LeakScope, Monitor, Profiler};
use memfit::optim::{AdamW, AdamWConfig};
use memfit::strategies::MemoryTimeline;
use memfit::tch::{Device, Kind, Tensor, nn};
use memfit::{Loss, Stack};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Watch {
    Off,
    Timeline,
    /// A timeline, a leak scope, and a monitor that writes ten lines a second.
    Everything,
    /// Everything and libtorch's profiler.
    Profiler,
}

const WATCHES: [(Watch, &str); 3] = [
    (Watch::Timeline, "`MemoryTimeline`"),
    (Watch::Everything, "+ `LeakScope` + `Monitor` at 10 Hz"),
    (Watch::Profiler, "+ `Profiler`"),
];

struct Subject {
    name: &'static str,
    vs: nn::VarStore,
    model: Gpt,
    batch: (Tensor, Tensor),
    /// Of one turn.
    steps: usize,
    /// Ratios, and turns of each.
    rounds: usize,
    turns: usize,
}

impl Subject {
    fn new(name: &'static str, config: &Config, [steps, rounds, turns]: [usize; 3]) -> Self {
        let vs = nn::VarStore::new(Device::Cpu);
        let model = Gpt::new(&vs.root(), config, Recompute::Never);
        let rows = Tensor::randint(256, [config.batch, config.context + 1], (Kind::Int64, Device::Cpu));
        let batch = (rows.narrow(1, 0, config.context), rows.narrow(1, 1, config.context).contiguous());
        Self { name, vs, model, batch, steps, rounds, turns }
    }

    /// Seconds of each step of a fresh stack, after two that warm it up.
    fn turn(&self, watch: Watch) -> Vec<f64> {
        let adamw = AdamW::new(&self.vs, AdamWConfig::default()).expect("an optimizer");
        let builder = Stack::of(&self.vs, adamw);
        let builder = if watch == Watch::Off { builder } else { builder.with(MemoryTimeline::new()) };
        let mut training = builder.build().expect("a stack");
        let everything = matches!(watch, Watch::Everything | Watch::Profiler);
        let folder = tempfile::tempdir().expect("a folder");
        let watching = everything.then(|| {
            let monitor = Monitor::every(Duration::from_millis(100));
            let monitor = monitor.write_json_lines(folder.path().join("memory.jsonl")).start();
            (monitor.expect("a monitor"), LeakScope::new().expect("a scope"))
        });
        let mut step = || {
            let start = Instant::now();
            let loss = || Ok(Loss::of(self.model.loss(&self.batch, true)));
            assert!(training.step_with(loss).expect("a step").stepped());
            start.elapsed().as_secs_f64()
        };
        (0..2).for_each(|_| {
            step();
        });
        let profiling = (watch == Watch::Profiler).then(|| Profiler::new().start().expect("a profiler"));
        let seconds = (0..self.steps).map(|_| step()).collect();
        drop((profiling, watching));
        seconds
    }
}

/// A tenth of the values are below it: what a step takes where nothing else disturbs it.
fn low(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 10).copied().unwrap_or(f64::NAN)
}

/// The ratio of a step watched over one that is not, of `turns` each.
fn ratio(subject: &Subject, watch: Watch) -> f64 {
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for turn in 0..subject.turns {
        // Either goes first as often.
        let order = if turn % 2 == 0 { [Watch::Off, watch] } else { [watch, Watch::Off] };
        for watch in order {
            let times = if watch == Watch::Off { &mut without } else { &mut with };
            times.extend(subject.turn(watch));
        }
    }
    low(with) / low(without)
}

fn main() {
    let measures = support::measures();
    memfit::tch::set_num_threads(1);
    let dropless = |config: Config| Config { dropout: 0.0, ..config };
    let subjects = [
        Subject::new("small", &dropless(Config::small()), if measures { [15, 9, 16] } else { [1; 3] }),
        Subject::new(
            "reference of 2 rows",
            &Config { batch: if measures { 2 } else { 1 }, ..dropless(Config::reference()) },
            if measures { [2, 5, 4] } else { [1; 3] },
        ),
    ];
    for subject in &subjects {
        for (watch, name) in WATCHES {
            let mut ratios: Vec<f64> = (0..subject.rounds).map(|_| ratio(subject, watch)).collect();
            ratios.sort_by(f64::total_cmp);
            let (least, most) = (ratios[0], ratios[ratios.len() - 1]);
            let median = ratios[ratios.len() / 2];
            println!("{}, {name}: {median:.2} ({least:.2}–{most:.2}) of the time without", subject.name);
        }
    }
    println!("one thread, which two would disturb more than watching does");
    println!("the time is that of the step which a tenth are faster than; medians of 9 and of 5 ratios");
}
