//! What a step will take, told before the first one.

#[path = "../examples/gpt/mod.rs"]
mod gpt;
mod support;
#[path = "support/training.rs"]
mod training;

use std::sync::{Arc, Mutex};

use gpt::{Amp, Choice, Config, Plan, Recompute, Split, When};
use memfit::memory::{FailAt, Held, Home, How, Limit, Phase, Role};
use memfit::optim::{AdamW, AdamWConfig, InBackward, Sgd, SgdConfig};
use memfit::strategies::{GradAccumulator, MasterWeights, MemoryTimeline, MicroBatcher, Rollback};
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};
use memfit::{Backward, CpuOffload, Error, Loss, NextBackward, Place, Result, Stack, StackBuilder, Strategy};
use support::{live, serial, sgd, vector};
use training::{KITS, Run, batch, difference_of, half};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Sees what is live right after a backward, before strategies further out have moved gradients.
#[derive(Clone, Debug, Default)]
struct Spy(Arc<Mutex<Vec<u64>>>);

impl Strategy for Spy {
    fn place(&self) -> Place {
        Place::Saved
    }
    fn backward(&mut self, pass: &mut Backward<'_>, next: NextBackward<'_>) -> Result<()> {
        next(pass)?;
        self.0.lock().unwrap().push(live());
        Ok(())
    }
}

/// A million fp16 weights in one tensor.
fn million() -> (nn::VarStore, Tensor) {
    let mut vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().zeros("w", &[1_000_000]);
    vs.half();
    (vs, w)
}

fn summed(w: &Tensor) -> Result<Loss> {
    Ok(Loss::mean(w.f_sum(Kind::Half)?, 1))
}

/// 2 bytes of weight, 4 of its fp32 copy, 8 of moments, 2 of gradient: 16; 18 with an fp32 gradient.
#[test]
fn a_million_half_weights_under_adam_are_16_megabytes_of_states_and_18_with_fp32_gradients() {
    let _guard = serial();
    let empty = live();
    let (vs, w) = million();
    let spy = Spy::default();
    let adamw = AdamW::new(&vs, AdamWConfig::default()).unwrap();
    let mut training = Stack::of(&vs, adamw)
        .with(MasterWeights::fp32())
        .with(GradAccumulator::every(2))
        .with(spy.clone())
        .build()
        .unwrap();
    let row = Tensor::zeros([1], CPU);
    let beside = row.numel() as u64 * 4;
    let estimate = training.estimate(&row, 1, |_| summed(&w)).unwrap();
    assert_eq!(Held::total(&estimate.parameters), 2_000_000);
    assert_eq!(Held::total(&estimate.master_weights), 4_000_000);
    assert_eq!(Held::total(&estimate.optimizer_state), 8_000_000);
    assert_eq!(Held::total(&estimate.gradients), 2_000_000);
    assert_eq!((estimate.gradients[0].kind, estimate.master_weights[0].kind), (Kind::Half, Kind::Float));
    assert_eq!(estimate.standing() + Held::total(&estimate.gradients), 16_000_000);
    assert_eq!(estimate.states(), 18_000_000);
    assert_eq!(live() - empty - beside, estimate.standing());
    // As the allocator counts: with fp16 gradients right after backward, then with fp32 sums.
    spy.0.lock().unwrap().clear();
    let _ = training.step_with(|| summed(&w)).unwrap();
    let seen = spy.0.lock().unwrap()[0] - empty - beside;
    // The loss itself, of 2 bytes, and its total, of 4.
    assert_eq!(seen, 16_000_000 + 2 + 4);
    assert_eq!(live() - empty - beside, 18_000_000 + 4);
    training.discard().unwrap();
}

#[test]
fn fp32_sums_of_an_accumulator_are_counted_and_so_are_copies() {
    let _guard = serial();
    let (vs, w) = million();
    let adamw = AdamW::new(&vs, AdamWConfig::default().moments(Kind::Float)).unwrap();
    let mut training = Stack::of(&vs, adamw).with(GradAccumulator::every(2).fp32()).build().unwrap();
    let row = Tensor::zeros([1], CPU);
    let estimate = training.estimate(&row, 1, |_| summed(&w)).unwrap();
    // 2 of weight, 8 of moments, 4 of sum in place of 2 of gradient.
    assert_eq!(
        (estimate.standing(), estimate.gradient_sums, estimate.states()),
        (10_000_000, 4_000_000, 14_000_000)
    );
    let before = live();
    let _ = training.step_with(|| summed(&w)).unwrap();
    assert!(live() - before < 10_000, "the sum was there already, the gradient is gone");
    assert!(training.step_with(|| summed(&w)).unwrap().stepped());
    // The rounded gradient stands beside the sum at the update.
    let error = training.estimate_error().unwrap();
    assert!(error.percent().abs() < 0.1, "{error}");

    let (vs, w) = vector(1000);
    let rolling = Stack::of(&vs, sgd(&vs)).with(Rollback::micro_batch());
    let mut training = rolling.with(GradAccumulator::every(3)).build().unwrap();
    let estimate = training.estimate(&row, 1, |_| Ok(Loss::mean(w.f_sum(Kind::Float)?, 1))).unwrap();
    assert_eq!(estimate.kept_gradients, 8000);
    let (vs, w) = vector(1000);
    let mut alone = Stack::of(&vs, sgd(&vs)).with(Rollback::micro_batch()).build().unwrap();
    let estimate = alone.estimate(&row, 1, |_| Ok(Loss::mean(w.f_sum(Kind::Float)?, 1))).unwrap();
    assert_eq!(estimate.kept_gradients, 4000);
}

/// Three layers; every tensor is so many bytes per row.
fn layers(vs: &nn::VarStore) -> nn::Sequential {
    nn::seq()
        .add(nn::linear(vs.root() / 0, 64, 256, Default::default()))
        .add_fn(|x| x.tanh().exp().tanh())
        .add(nn::linear(vs.root() / 1, 256, 64, Default::default()))
        .add_fn(|x| x.dropout(0.5, true))
        .add(nn::linear(vs.root() / 2, 64, 8, Default::default()))
}

type Maker = fn(&nn::VarStore) -> StackBuilder;

fn adamw(vs: &nn::VarStore) -> AdamW {
    AdamW::new(vs, AdamWConfig::default()).unwrap()
}

/// Rows, and rows of the batch: as many as run, fewer, one.
#[test]
fn where_bytes_are_a_part_per_row_the_peak_is_right_to_the_byte() {
    let _guard = serial();
    let makers: [Maker; 4] = [
        |vs| Stack::of(vs, sgd(vs)),
        |vs| Stack::of(vs, adamw(vs)).with(GradAccumulator::every(3)),
        |vs| Stack::of(vs, InBackward::new(adamw(vs)).unwrap()),
        |vs| {
            let heavy = Sgd::new(vs, SgdConfig::default().lr(0.1).momentum(0.9)).unwrap();
            Stack::of(vs, InBackward::new(heavy).unwrap()).with(GradAccumulator::every(2))
        },
    ];
    for (index, maker) in makers.into_iter().enumerate() {
        // From a peak in gradients to one in activations.
        for (rows, how) in [(1, How::Ran), (2, How::Ran), (3, How::EveryMoment), (200, How::EveryMoment)] {
            let vs = nn::VarStore::new(Device::Cpu);
            let model = layers(&vs);
            let x = Tensor::randn([rows, 64], CPU);
            let loss = |x: &Tensor| Ok(Loss::mean(model.forward(x).square().mean(Kind::Float), x.size()[0]));
            let mut training = maker(&vs).build().unwrap();
            let estimate = training.estimate(&x, rows, loss).unwrap();
            assert_eq!(training.estimate_error(), None);
            while !training.step_with(|| loss(&x)).unwrap().stepped() {}
            let error = training.estimate_error().unwrap();
            assert_eq!(estimate.how, how);
            assert_eq!(error.predicted, error.measured, "{index}, {rows} rows: {error}\n{estimate}");
            let roles = estimate.roles.unwrap();
            assert_eq!(roles.total(), estimate.peak);
            assert_eq!(roles[Role::Parameters], Held::total(&estimate.parameters));
        }
    }
}

#[test]
fn activations_are_a_fixed_part_and_a_part_per_row() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().ones("w", &[100]);
    let mut training = Stack::of(&vs, sgd(&vs)).build().unwrap();
    // exp of the weights is kept once, tanh of the product for each row; the mean, the product and
    // a mean's scalar besides.
    let loss = |x: &Tensor| Ok(Loss::mean((w.exp() * x).tanh().mean(Kind::Float), x.size()[0]));
    let x = Tensor::ones([5, 100], CPU);
    let estimate = training.estimate(&x, 50, loss).unwrap();
    assert_eq!(estimate.activations.per_row, 400);
    // exp, and the loss.
    assert_eq!(estimate.activations.fixed, 400 + 4);
    assert_eq!(estimate.activations.bytes, 50 * 400 + 404);
}

/// One row needs no copy to be contiguous; a loop over rows has more events for more of them.
#[test]
fn rows_that_do_something_else_than_others_are_found() {
    let _guard = serial();
    let x = Tensor::randn([50, 64], CPU);
    let vs = nn::VarStore::new(Device::Cpu);
    let model = layers(&vs);
    let mut training = Stack::of(&vs, adamw(&vs)).build().unwrap();
    let copied = |x: &Tensor| {
        let columns = model.forward(x).tr().contiguous();
        Ok(Loss::mean(columns.exp().mean(Kind::Float), x.size()[0]))
    };
    let estimate = training.estimate(&x, 50, copied).unwrap();
    assert_eq!(estimate.how, How::EveryMoment);
    assert!(training.step_with(|| copied(&x)).unwrap().stepped());
    let error = training.estimate_error().unwrap();
    assert_eq!(error.predicted, error.measured, "{error}");

    let looped = |x: &Tensor| {
        let rows = x.size()[0];
        let each = (0..rows).map(|row| model.forward(&x.narrow(0, row, 1)).exp().mean(Kind::Float));
        Ok(Loss::mean(each.reduce(|sum, row| sum + row).unwrap() / rows as f64, rows))
    };
    let estimate = training.estimate(&x, 50, looped).unwrap();
    assert_eq!(estimate.how, How::EachPass);
    assert!(training.step_with(|| looped(&x)).unwrap().stepped());
    let error = training.estimate_error().unwrap();
    assert!(error.percent().abs() < 5.0, "{error}");
}

/// The errors that `docs/memory-model.md` tells: run it with `--nocapture`.
#[test]
fn the_peak_of_a_gpts_first_step_is_within_a_few_percent() {
    let _guard = serial();
    let folder = std::env::temp_dir();
    let plain = Plan::plain(1e-3);
    let checkpoint = Recompute::Every(1);
    let plans = [
        plain.clone(),
        Plan { amp: Amp::Bf16, ..plain.clone() },
        Plan { recompute: checkpoint, ..plain.clone() },
        Plan { amp: Amp::Bf16, recompute: checkpoint, ..plain.clone() },
        Plan { split: Split::Into(4), ..plain.clone() },
        Plan { amp: Amp::Bf16, recompute: checkpoint, split: Split::Into(4), ..plain.clone() },
        Plan { when: When::InBackward, ..plain.clone() },
        Plan { state: Some(folder.clone()), recompute: checkpoint, ..plain.clone() },
        Plan { activations: Some(folder.clone()), ..plain.clone() },
        Plan { weights: Some(folder.clone()), recompute: checkpoint, ..plain.clone() },
        Plan { optimizer: Choice::AdamW8bit, split: Split::Into(16), ..plain.clone() },
        Plan { split: Split::AsFits, ..plain.clone() },
    ];
    let config = Config { batch: 16, ..Config::small() };
    for plan in plans {
        memfit::tch::manual_seed(1);
        let mut training = plan.start(&config).unwrap();
        let bytes = Tensor::randint(256, [config.batch, config.context], (Kind::Int64, Device::Cpu));
        let batch = (bytes.shallow_clone(), bytes);
        let micro_batches = match plan.split {
            Split::Whole => 1,
            Split::Into(micro_batches) => micro_batches,
            Split::AsFits => 4,
        };
        let rows = config.batch / micro_batches as i64;
        if let Some(splits) = training.stack.strategy_mut::<MicroBatcher>() {
            *splits = MicroBatcher::new().start(rows);
        }
        let model = &training.model;
        let estimate = training
            .stack
            .estimate(&batch, rows, |micro| Ok(Loss::mean(model.loss(micro, true), micro.0.numel())))
            .unwrap();
        assert!(training.step(&batch).unwrap().stepped());
        let error = training.stack.estimate_error().unwrap();
        println!("{}: {error}, {:?}, in {}", plan.name(), estimate.how, estimate.phase.name());
        assert_ne!(estimate.how, How::EachPass, "{}", plan.name());
        assert!(error.percent().abs() < 3.0, "{}: {error}\n{estimate}", plan.name());
    }
}

#[test]
fn one_row_is_scaled_as_a_whole_where_the_sample_has_no_other() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let model = layers(&vs);
    let mut training = Stack::of(&vs, adamw(&vs)).build().unwrap();
    let loss = |x: &Tensor| Ok(Loss::mean(model.forward(x).square().mean(Kind::Float), x.size()[0]));
    let estimate = training.estimate(&Tensor::randn([1, 64], CPU), 300, loss).unwrap();
    assert_eq!(estimate.how, How::OneRow);
    let _ = training.step_with(|| loss(&Tensor::randn([300, 64], CPU))).unwrap();
    let error = training.estimate_error().unwrap();
    assert!(error.percent().abs() < 10.0, "{error}");
}

/// Where a threshold decides what leaves memory all rows would tell; fewer do where they do not fit.
#[test]
fn rows_that_do_not_fit_are_told_by_half_of_them() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let model = layers(&vs);
    let offload = CpuOffload::activations().disk(std::env::temp_dir());
    let mut training = Stack::of(&vs, adamw(&vs)).with(offload).build().unwrap();
    let loss = |x: &Tensor| Ok(Loss::mean(model.forward(x).f_square()?.f_mean(Kind::Float)?, x.size()[0]));
    let batch = Tensor::randn([512, 64], CPU);
    let all = training.estimate(&batch, 512, loss).unwrap();
    let limit = Limit::new(live() + (all.peak - live()) * 3 / 4).unwrap();
    let half = training.estimate(&batch, 512, loss).unwrap();
    drop(limit);
    assert_eq!(all.how, How::Ran);
    assert_ne!(half.how, How::Ran);
    let off = half.peak.abs_diff(all.peak) as f64 / all.peak as f64;
    assert!(off < 0.05, "{half}\n{all}");
}

#[test]
fn everything_is_put_back_to_the_bit_and_the_byte() {
    let _guard = serial();
    for kit in KITS {
        let mut run = Run::new(kit, 5);
        let check = |run: &mut Run, steps: &str| {
            let before = run.stack.state().unwrap();
            let left = run.stack.parameters().iter().map(|w| w.tensor.grad()).filter(Tensor::defined);
            // A skipped step leaves its gradients until the next window.
            let bytes = live() - 4 * left.map(|grad| grad.numel() as u64).sum::<u64>();
            let now = live();
            let net = &run.net;
            let x = batch(2);
            let beside = live() - now;
            let estimate = run.stack.estimate(&x, 50, |x| Ok(Loss::mean(net.loss(x), x.size()[0]))).unwrap();
            assert!(estimate.peak > estimate.live, "{kit:?}");
            assert_eq!(live() - beside, bytes, "{kit:?} {steps}");
            assert_eq!(difference_of(&before, &run.stack.state().unwrap()), None, "{kit:?} {steps}");
            assert!(run.vs.trainable_variables().iter().all(|w| !w.grad().defined()), "{kit:?}");
        };
        check(&mut run, "before the first step");
        let _ = run.train(0, 6);
        check(&mut run, "after two");
        // And the run goes on as one without it.
        let _ = run.train(6, 9);
        let mut other = Run::new(kit, 5);
        let _ = other.train(0, 9);
        let same = difference_of(&run.stack.state().unwrap(), &other.stack.state().unwrap());
        assert_eq!(same, None, "{kit:?}");
    }
    for masters in [true, false] {
        let (_vs, linear, mut stack) = half(masters, 3);
        let x = Tensor::randn([6, 4], CPU).to_kind(Kind::BFloat16);
        let bytes = live();
        let loss = |x: &Tensor| Ok(Loss::mean(linear.forward(x).square().mean(Kind::Float), x.size()[0]));
        stack.estimate(&x, 20, loss).unwrap();
        assert_eq!(live(), bytes, "masters: {masters}");
    }
}

#[test]
fn a_failure_puts_everything_back_too() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let model = layers(&vs);
    let mut training = Stack::of(&vs, adamw(&vs)).with(GradAccumulator::every(2)).build().unwrap();
    let x = Tensor::randn([4, 64], CPU);
    let loss = |x: &Tensor| Ok(Loss::mean(model.forward(x).f_square()?.f_mean(Kind::Float)?, x.size()[0]));
    let before = training.state().unwrap();
    let bytes = live();
    let limit = Limit::new(live() + 1000).unwrap();
    let error = training.estimate(&x, 4, loss).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    drop(limit);
    // At every allocation in turn, until one attempt goes through.
    let mut failures = 0;
    loop {
        let failing = FailAt::nth(failures + 1).unwrap();
        let ran = training.estimate(&x, 4, loss);
        drop(failing);
        match ran {
            Ok(_) => break,
            Err(error) => assert!(error.is_out_of_memory(), "{error}"),
        }
        failures += 1;
        assert_eq!(live(), bytes, "{failures}");
    }
    assert!(failures > 20);
    assert!(matches!(training.estimate(&x, 4, |_| panic!("no")), Err(Error::Panic { .. })));
    assert_eq!(live(), bytes);
    assert_eq!(difference_of(&before, &training.state().unwrap()), None);
    assert!(training.step_with(|| loss(&x)).is_ok());
    training.discard().unwrap();
}

#[test]
fn what_cannot_be_estimated_is_refused() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(2)).build().unwrap();
    let loss = |g: &Tensor| Ok(Loss::mean((&w * g).sum(Kind::Float), g.size()[0]));
    let one = Tensor::ones([1], CPU);
    let config = |result: Result<memfit::memory::Estimate>| {
        matches!(result, Err(Error::Config { setting: "Stack::estimate", .. }))
    };
    assert!(config(training.estimate(&Tensor::ones([0], CPU), 4, loss)));
    assert!(config(training.estimate(&one, 0, loss)));
    assert!(config(training.estimate(&one, 4, |g| Ok(Loss::mean((&w * g).sum(Kind::Float), 0)))));
    let _ = training.step_with(|| loss(&one)).unwrap();
    assert!(matches!(training.estimate(&one, 4, loss), Err(Error::CallOrder { .. })));
    training.discard().unwrap();
    assert!(training.estimate(&one, 4, loss).is_ok());

    // A momentum in backward that is discarded in its window poisons.
    let heavy = Sgd::new(&vs, SgdConfig::default().momentum(0.9)).unwrap();
    let early = Stack::of(&vs, InBackward::new(heavy).unwrap());
    let mut training = early.with(GradAccumulator::every(2)).build().unwrap();
    let _ = training.step_with(|| loss(&one)).unwrap();
    assert!(matches!(training.discard(), Err(Error::Poisoned { .. })));
    let refused = training.estimate(&one, 4, loss).unwrap_err().to_string();
    assert!(refused.contains("load a snapshot"), "{refused}");
}

#[test]
fn the_table_tells_what_is_where() {
    let _guard = serial();
    let (vs, w) = vector(1 << 20);
    let offload = CpuOffload::optimizer(adamw(&vs)).disk(std::env::temp_dir()).unwrap();
    let mut training = Stack::of(&vs, offload).build().unwrap();
    let loss = |x: &Tensor| Ok(Loss::mean((&w * x.sum(Kind::Float)).sum(Kind::Float), 1));
    let estimate = training.estimate(&Tensor::ones([2], CPU), 7, loss).unwrap();
    let state = &estimate.optimizer_state[0];
    assert_eq!((state.kind, state.home, state.bytes), (Kind::Float, Home::Away, 8 << 20));
    // Both moments of the one weight are in memory at its update.
    assert_eq!(estimate.phase, Phase::Update);
    let table = estimate.to_string();
    for part in [
        "7 rows",
        "optimizer state         8.4 MB  Float, offloaded",
        "predicted peak",
        "in update; continued from a few rows",
    ] {
        assert!(table.contains(part), "{part}:\n{table}");
    }
    let _ = training.step_with(|| loss(&Tensor::ones([7], CPU))).unwrap();
    let error = training.estimate_error().unwrap();
    assert!(error.percent().abs() < 1.0, "{error}");
    assert!(error.to_string().contains("peak predicted"), "{error}");
    // The next step changes nothing of what the first one told.
    let _ = training.step_with(|| loss(&Tensor::ones([7], CPU))).unwrap();
    assert_eq!(training.estimate_error(), Some(error));
}

/// A timeline in the stack shares its room for events with an estimate.
#[test]
fn beside_a_timeline_it_sees_as_much_as_there_is_room_for() {
    let _guard = serial();
    for (room, how) in [(memfit::memory::EVENTS, How::EveryMoment), (1000, How::EachPass)] {
        let vs = nn::VarStore::new(Device::Cpu);
        let model = layers(&vs);
        let timeline = MemoryTimeline::new().capacity(room);
        let mut training = Stack::of(&vs, adamw(&vs)).with(timeline).build().unwrap();
        let loss = |x: &Tensor| Ok(Loss::mean(model.forward(x).square().mean(Kind::Float), x.size()[0]));
        let x = Tensor::randn([60, 64], CPU);
        let estimate = training.estimate(&x, 60, loss).unwrap();
        assert_eq!(estimate.how, how);
        assert!(training.step_with(|| loss(&x)).unwrap().stepped());
        let error = training.estimate_error().unwrap();
        assert!(error.percent().abs() < 5.0, "{error}");
        let timeline = training.strategy::<MemoryTimeline>().unwrap().timeline().unwrap();
        assert_eq!(timeline.peak().bytes, error.measured);
    }
}
