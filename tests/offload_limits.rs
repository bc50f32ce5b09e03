//! Offloading against the machine: bytes that really leave, disks that fill up, files that
//! cannot be read.
#![cfg(target_os = "linux")]

mod support;

use std::path::Path;

use memfit::memory;
use memfit::offload::{CpuOffload, Moved};
use memfit::optim::{AdamW, AdamWConfig, Optimizer, Sgd, SgdConfig};
use memfit::tch::nn::{self, Module};
use memfit::tch::{Device, Kind, Tensor};
use memfit::{ActivationCheckpoint, Error, Loss, Stack, Update};
use support::process::is_alone;

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);
const ROWS: i64 = 1024;
const WIDTH: i64 = 256;
const BLOCKS: usize = 12;
/// One activation, and what one block saves that is not shared with its neighbours: the
/// first linear layer's output before and after the GELU, and the block's own output.
const NARROW: u64 = (ROWS * WIDTH * 4) as u64;
const WIDE: u64 = 4 * NARROW;

fn model(vs: &nn::VarStore) -> Vec<nn::Sequential> {
    let block = |index: usize| {
        let path = vs.root() / index;
        let first = nn::linear(&path / "a", WIDTH, 4 * WIDTH, Default::default());
        let second = nn::linear(&path / "b", 4 * WIDTH, WIDTH, Default::default());
        nn::seq().add(first).add_fn(|x| x.gelu("tanh")).add(second)
    };
    (0..BLOCKS).map(block).collect()
}

fn loss_of(model: &[impl Module], x: &Tensor) -> Tensor {
    model.iter().fold(x.shallow_clone(), |x, block| block.forward(&x)).square().mean(Kind::Float)
}

fn live() -> u64 {
    memory::stats(Device::Cpu).expect("figures").current
}

fn anonymous() -> u64 {
    memory::release_caches(Device::Cpu).expect("release");
    support::process::anonymous()
}

/// Counted and resident bytes that a forward pass leaves behind, in a process of its own.
#[test]
fn child_reports_what_forward_leaves() {
    let _guard = support::serial();
    let Ok(mode) = std::env::var("MEMFIT_OFFLOAD_CHILD") else { return };
    let _pages = support::process::SmallPages::hold();
    if let Some(what) = mode.strip_prefix("state-") {
        return report_state(what);
    }
    if let Some(what) = mode.strip_prefix("weights-") {
        return report_weights(what);
    }
    let vs = nn::VarStore::new(Device::Cpu);
    let model = model(&vs);
    let x = Tensor::randn([ROWS, WIDTH], CPU);
    // Once for what libtorch's kernels keep for themselves.
    drop(loss_of(&model, &x));
    let mut offload = CpuOffload::activations().disk(std::env::temp_dir());
    let (counted, resident) = (live(), anonymous());
    let loss = match mode.as_str() {
        "plain" => loss_of(&model, &x),
        _ => offload.around(Device::Cpu, &[], || Ok(loss_of(&model, &x))).expect("forward"),
    };
    println!("measured {} {}", live() - counted, anonymous() as i64 - resident as i64);
    loss.backward();
}

/// What AdamW's state takes after one update.
fn report_state(home: &str) {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = model(&vs);
    let x = Tensor::randn([64, WIDTH], CPU);
    loss_of(&model, &x).backward();
    let adamw = AdamW::new(&vs, AdamWConfig::default()).expect("an optimizer");
    let (counted, resident) = (live(), anonymous());
    let mut optimizer: Box<dyn Optimizer> = match home {
        "plain" => Box::new(adamw),
        _ => Box::new(CpuOffload::optimizer(adamw).disk(std::env::temp_dir()).expect("a file")),
    };
    optimizer.step(&Update::plain()).expect("an update");
    println!("measured {} {}", live() as i64 - counted as i64, anonymous() as i64 - resident as i64);
}

/// What a model's weights take after one evaluation.
fn report_weights(home: &str) {
    let (counted, resident) = (live(), anonymous());
    let vs = nn::VarStore::new(Device::Cpu);
    let blocks: Vec<Box<dyn Module>> = (0..8)
        .map(|index| {
            let block = nn::linear(vs.root() / index, 1024, 1024, Default::default());
            if home == "plain" {
                return Box::new(block) as Box<dyn Module>;
            }
            let weights = vec![block.ws.shallow_clone()];
            Box::new(CpuOffload::parameters(block, &weights).disk(std::env::temp_dir()).expect("a file"))
        })
        .collect();
    let _no_grad = memfit::tch::no_grad_guard();
    let x = Tensor::randn([4, 1024], CPU);
    drop(blocks.iter().fold(x.shallow_clone(), |x, block| block.forward(&x)));
    println!("measured {} {}", live() as i64 - counted as i64, anonymous() as i64 - resident as i64);
}

fn measured(mode: &str) -> (i64, i64) {
    let program = std::env::current_exe().expect("this test");
    let output = std::process::Command::new(program)
        .args(["--exact", "child_reports_what_forward_leaves", "--nocapture"])
        .env("MEMFIT_OFFLOAD_CHILD", mode)
        // glibc never trims the free top of another thread's heap below twice the largest block
        // that it has seen: large blocks in mappings of their own leave nothing there.
        .env("MALLOC_MMAP_THRESHOLD_", "1048576")
        .output()
        .expect("a child");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find_map(|line| line.split_once("measured ")).expect("a report").1;
    let mut numbers = line.split(' ').map(|number| number.trim().parse().expect("a number"));
    (numbers.next().expect("counted"), numbers.next().expect("resident"))
}

/// Rule 11: what leaves the counter leaves the machine.
#[test]
fn resident_memory_falls_by_what_the_counter_says() {
    let _guard = support::serial();
    let (counted_plain, resident_plain) = measured("plain");
    let (counted, resident) = measured("offload");
    let saved = BLOCKS as u64 * (2 * WIDE + NARROW);
    // The loss stays, and the input, which the caller holds.
    assert!(counted_plain >= saved as i64, "{counted_plain}");
    assert!(counted < 4096, "{counted} bytes left in memory");
    let fell = (resident_plain - resident) as f64 / (counted_plain - counted) as f64;
    assert!(
        (0.9..1.1).contains(&fell),
        "resident fell by {fell} of the counted: {resident_plain} {resident}"
    );
}

/// Rule 11, for state and for weights: on disk they are neither counted nor resident.
#[test]
fn state_and_weights_on_disk_leave_the_machine_too() {
    let _guard = support::serial();
    let state = 8 * BLOCKS as i64 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH);
    let weights = 8 * 1024 * 1024 * 4;
    for (plain, away, bytes) in
        [("state-plain", "state-disk", state), ("weights-plain", "weights-disk", weights)]
    {
        let (counted_plain, resident_plain) = measured(plain);
        let (counted, resident) = measured(away);
        assert!(counted_plain - counted >= bytes, "{plain}: {counted_plain} {counted}, wanted {bytes}");
        let fell = (resident_plain - resident) as f64 / (counted_plain - counted) as f64;
        assert!(
            (0.85..1.15).contains(&fell),
            "{plain}: resident fell by {fell}: {resident_plain} {resident}"
        );
    }
}

#[test]
fn weights_without_a_usable_folder_stay_where_they_are() {
    let _guard = support::serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let block = nn::linear(vs.root(), 16, 16, Default::default());
    let (weight, before) = (block.ws.shallow_clone(), block.ws.detach().copy());
    let refused =
        CpuOffload::parameters(block, &vec![weight.shallow_clone()]).disk(Path::new("/no such folder"));
    assert!(matches!(refused.map(drop), Err(Error::Io { .. })));
    assert_eq!(weight, before);
}

/// Cost: what leaves is every block's saved tensors, and the peak is what one operator needs.
#[test]
fn the_peak_of_twelve_blocks_is_that_of_one_operator() {
    let _guard = support::serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let model = model(&vs);
    let x = Tensor::randn([ROWS, WIDTH], CPU);
    loss_of(&model, &x).backward();
    let start = live();
    let mut offload = CpuOffload::activations().disk(std::env::temp_dir());
    let (peak, again) = {
        let mut run = || {
            memory::peak_of(Device::Cpu, || {
                let loss = offload.around(Device::Cpu, &[], || Ok(loss_of(&model, &x)));
                loss.expect("forward").backward();
            })
            .expect("a peak")
            .1
        };
        (run() - start, run() - start)
    };
    assert_eq!(peak, again, "two runs, one peak");
    // Backward of the GELU: its input, its gradient out and in; of a linear layer: its input
    // and two gradients. Parameters' gradients are there already.
    assert!(peak <= 3 * WIDE + NARROW + 2 * (4 * WIDTH * WIDTH * 4) as u64, "{peak}");
    let Moved { out_bytes, in_bytes, copies_out, peak_on_disk, live_on_disk, .. } = offload.moved();
    // Per block: input, GELU's input and output; the loss's own input at the end.
    let per_run = (BLOCKS as u64) * (NARROW + 2 * WIDE) + NARROW;
    assert_eq!(out_bytes, 2 * per_run);
    assert_eq!(in_bytes, out_bytes);
    assert_eq!(copies_out, 2 * (3 * BLOCKS as u64 + 1));
    assert_eq!((peak_on_disk, live_on_disk), (per_run, 0));
}

/// Case 38: around checkpointing the segments' inputs leave.
#[test]
fn around_checkpointing_the_segment_inputs_leave() {
    let _guard = support::serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let plain = model(&vs);
    let x = Tensor::randn([ROWS, WIDTH], CPU);
    loss_of(&plain, &x).backward();
    let expected: Vec<Tensor> = vs.trainable_variables().iter().map(|w| w.grad().copy()).collect();
    vs.trainable_variables().iter().for_each(|w| drop(w.grad().zero_()));
    let segments: Vec<_> = plain.into_iter().map(ActivationCheckpoint::new).collect();
    let mut offload = CpuOffload::activations().disk(std::env::temp_dir());
    let loss = offload.around(Device::Cpu, &[], || Ok(loss_of(&segments, &x))).expect("forward");
    loss.backward();
    let found: Vec<Tensor> = vs.trainable_variables().iter().map(|w| w.grad()).collect();
    assert!(support::same(&expected, &found));
    assert_eq!(offload.moved().out_bytes, (BLOCKS as u64 + 1) * NARROW, "inputs, and the loss's");
}

/// Weights on disk, inside and around checkpointing.
#[test]
fn offloaded_weights_work_inside_and_around_checkpointing() {
    let _guard = support::serial();
    let make = || {
        memfit::tch::manual_seed(9);
        let vs = nn::VarStore::new(Device::Cpu);
        let first = nn::linear(vs.root() / "a", 32, 64, Default::default());
        let second = nn::linear(vs.root() / "b", 64, 32, Default::default());
        (vs, nn::seq().add(first).add_fn(|x| x.gelu("tanh")).add(second))
    };
    let x = Tensor::randn([8, 32], CPU);
    let run = |block: &dyn Module| block.forward(&block.forward(&x)).square().sum(Kind::Float).backward();
    let (plain_vs, plain) = make();
    run(&plain);
    let gradients =
        |vs: &nn::VarStore| vs.trainable_variables().iter().map(|w| w.grad()).collect::<Vec<Tensor>>();
    let home = std::env::temp_dir();
    let (vs, block) = make();
    let inside = ActivationCheckpoint::new(CpuOffload::parameters(block, &vs).disk(&home).expect("a folder"));
    run(&inside);
    assert!(support::same(&gradients(&plain_vs), &gradients(&vs)));
    assert!(vs.trainable_variables().iter().all(|weight| weight.f_sum(Kind::Float).is_err()), "away");
    let (vs, block) = make();
    let around = CpuOffload::parameters(ActivationCheckpoint::new(block), &vs).disk(&home).expect("a folder");
    run(&around);
    assert!(support::same(&gradients(&plain_vs), &gradients(&vs)));
    assert!(vs.trainable_variables().iter().all(|weight| weight.f_sum(Kind::Float).is_err()), "away");
}

/// No file of this process grows beyond so many bytes while this lives: a disk that is full. What the tests' own
/// output goes to may be a file, too, so this is for a process whose output is a pipe.
struct FullDisk(libc::rlimit);

impl FullDisk {
    fn after(bytes: u64) -> Self {
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the struct is ours; the signal is ignored so that the call fails instead.
        unsafe {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            libc::getrlimit(libc::RLIMIT_FSIZE, &mut before);
            libc::setrlimit(libc::RLIMIT_FSIZE, &libc::rlimit { rlim_cur: bytes, ..before });
        }
        Self(before)
    }
}

impl Drop for FullDisk {
    fn drop(&mut self) {
        // SAFETY: the struct is ours.
        unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &self.0) };
    }
}

#[test]
fn a_full_disk_in_forward_is_an_io_error_and_training_goes_on() {
    let _guard = support::serial();
    if !is_alone("a_full_disk_in_forward_is_an_io_error_and_training_goes_on") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let x = Tensor::randn([64, 32], CPU);
    let make = || {
        memfit::tch::manual_seed(4);
        let vs = nn::VarStore::new(Device::Cpu);
        let first = nn::linear(vs.root() / "a", 32, 512, Default::default());
        let second = nn::linear(vs.root() / "b", 512, 32, Default::default());
        (vs, nn::seq().add(first).add_fn(|x| x.tanh()).add(second))
    };
    let (plain_vs, plain) = make();
    let mut optimizer = Sgd::new(&plain_vs, SgdConfig::default().lr(0.1)).expect("an optimizer");
    for _ in 0..2 {
        optimizer.zero_grad();
        loss_of(std::slice::from_ref(&plain), &x).backward();
        optimizer.step(&Update::plain()).expect("a step");
    }
    let (vs, block) = make();
    let optimizer = Sgd::new(&vs, SgdConfig::default().lr(0.1)).expect("an optimizer");
    let offload = CpuOffload::activations().disk(folder.path()).min_bytes(1);
    let observer = offload.observer();
    let mut training = Stack::of(&vs, optimizer).with(offload).build().expect("a stack");
    let mut step = || training.step_with(|| Ok(Loss::of(loss_of(std::slice::from_ref(&block), &x))));
    assert!(step().expect("room").stepped());
    let moved = observer.moved();
    assert!(moved.out_bytes > 64 * 512 * 4 && moved.live_on_disk == 0);
    let before = support::copies(&vs.trainable_variables());
    {
        let folder = tempfile::tempdir().expect("a folder");
        let optimizer = Sgd::new(&vs, SgdConfig::default().lr(0.1)).expect("an optimizer");
        let offload = CpuOffload::activations().disk(folder.path()).min_bytes(1);
        let mut cramped = Stack::of(&vs, optimizer).with(offload).build().expect("a stack");
        let full = FullDisk::after(64 << 10);
        let failed = cramped.step_with(|| Ok(Loss::of(loss_of(std::slice::from_ref(&block), &x))));
        drop(full);
        assert!(matches!(&failed, Err(Error::Io { path, .. }) if path == folder.path()), "{failed:?}");
    }
    assert!(support::same(&before, &vs.trainable_variables()));
    assert!(step().expect("room again").stepped());
    assert!(support::same(&plain_vs.trainable_variables(), &vs.trainable_variables()));
}

#[test]
fn a_disk_too_small_for_optimizer_state_is_found_when_it_is_made() {
    let _guard = support::serial();
    if !is_alone("a_disk_too_small_for_optimizer_state_is_found_when_it_is_made") {
        return;
    }
    let parameters = vec![Tensor::randn([1 << 16], CPU).set_requires_grad(true)];
    let optimizer = AdamW::new(&parameters, AdamWConfig::default()).expect("an optimizer");
    let mut offloaded = CpuOffload::optimizer(optimizer).disk(std::env::temp_dir()).expect("a folder");
    let full = FullDisk::after(128 << 10);
    let refused = offloaded.allocate();
    drop(full);
    assert!(matches!(refused, Err(Error::Io { .. })));
    assert!(parameters[0].requires_grad(), "what was hidden is put back");
}

/// Cuts the offload file in `folder` to so many bytes.
fn cut(folder: &Path, bytes: u64) {
    // Links to open files have no links in them.
    let folder = folder.canonicalize().expect("a folder");
    let mut found = 0;
    let fds = std::fs::read_dir("/proc/self/fd").expect("open files");
    for fd in fds.filter_map(Result::ok) {
        let target = std::fs::read_link(fd.path()).unwrap_or_default();
        if target.starts_with(&folder) {
            found += 1;
            std::fs::OpenOptions::new().write(true).open(fd.path()).expect("it").set_len(bytes).expect("cut");
        }
    }
    assert_eq!(found, 1, "files in {}", folder.display());
}

fn step_with_a_cut_file(left: u64) -> (memfit::Result<()>, u64, [bool; 2]) {
    let folder = tempfile::tempdir().expect("a folder");
    let parameters: Vec<Tensor> = (0..2).map(|_| Tensor::randn([64], CPU).set_requires_grad(true)).collect();
    let optimizer = AdamW::new(&parameters, AdamWConfig::default()).expect("an optimizer");
    let mut optimizer = CpuOffload::optimizer(optimizer).disk(folder.path()).expect("a folder");
    optimizer.allocate().expect("room");
    let losses: Vec<Tensor> = parameters.iter().map(|p| p.square().sum(Kind::Float)).collect();
    Tensor::stack(&losses, 0).sum(Kind::Float).backward();
    let before = support::copies(&parameters);
    cut(folder.path(), left);
    let stepped = optimizer.step(&Update::plain());
    let moved = [0, 1].map(|index| !before[index].equal(&parameters[index]));
    (stepped, optimizer.get_ref().steps(), moved)
}

#[test]
fn state_that_cannot_be_read_leaves_every_parameter_where_it_was() {
    let _guard = support::serial();
    let (failed, steps, moved) = step_with_a_cut_file(0);
    assert!(matches!(failed, Err(Error::Io { .. })), "{failed:?}");
    assert_eq!((steps, moved), (0, [false, false]));
}

#[test]
fn state_lost_after_the_first_parameter_moved_poisons_the_training() {
    let _guard = support::serial();
    // A page for each of the first parameter's two moments is left.
    let (failed, _, moved) = step_with_a_cut_file(2 * 4096);
    assert!(matches!(failed, Err(Error::Poisoned { .. })), "{failed:?}");
    assert_eq!(moved, [true, false]);
}
