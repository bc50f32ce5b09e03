//! What is said where one row does not fit.

use memfit::memory::Advice;

use super::*;

fn advice_of(error: &Error) -> (&Advice, &Error) {
    let Error::DoesNotFit { advice, source } = error else { panic!("{error}") };
    (advice, source)
}

fn lines(advice: &Advice) -> Vec<&str> {
    advice.helps.iter().map(|help| help.line.as_str()).collect()
}

/// Case 54: the text of a refusal in forward, through a step, with the bytes asked for.
#[test]
fn one_row_that_does_not_fit_is_explained() {
    let _guard = serial();
    let net = Net::new();
    let mut training = net.stack();
    let _ = training.step_batch(&floats(&[4, WIDTH]), |x| Ok(net.loss(x))).unwrap();
    let x = floats(&[4, WIDTH]);
    let before = net.weights();
    let spared = live();
    let limit = Limit::new(live() + 10_000).unwrap();
    let error = training
        .step_batch(&x, |x| {
            let _segment = memfit::memory::segment("wide");
            let wide = (x.repeat([1, 32]) * net.vs.trainable_variables()[0].sum(Kind::Float)).exp();
            Ok(Loss::mean(wide.mean(Kind::Float), 1))
        })
        .unwrap_err();
    drop(limit);
    let (advice, source) = advice_of(&error);
    let bytes = (WIDTH * 32 * 4) as u64;
    // The repeated row and the sum are there, the product is refused.
    let Error::OutOfMemory { requested, live: there, limit, .. } = source else { panic!("{source}") };
    assert_eq!((*requested, *there), (Some(bytes), Some(spared + bytes + 4)));
    assert_eq!(*limit, Some(spared + 10_000));
    assert_eq!(advice.missing, Some(2 * bytes + 4 - 10_000));
    let peak = advice.peak.as_ref().unwrap();
    assert_eq!((peak.phase.name(), peak.segment.as_deref()), ("forward", Some("wide")));
    // The sum has a scratch of its own for a moment.
    assert!((0..100).contains(&(peak.bytes - spared - bytes - 4)), "{}", peak.bytes - spared);
    assert!(advice.holders.len() <= 5);
    let weights: u64 = before.iter().map(|weight| 4 * weight.numel() as u64).sum();
    let held = |role| advice.holders.iter().find(|one| one.role == role).map(|one| one.bytes);
    assert_eq!(held(Role::Parameters), Some(weights), "{error}");
    // The row, and the sum's 4 bytes where they are there by then.
    let activations = held(Role::Activations).unwrap();
    assert!((bytes..=bytes + 4).contains(&activations), "{error}");

    let freed = |line: &str| {
        let help = advice.helps.iter().find(|help| help.line.contains(line));
        help.unwrap_or_else(|| panic!("{line} is missing in {error}")).bytes
    };
    assert_eq!(freed("AmpScaler::bf16()"), Some(activations / 2));
    assert_eq!(freed("ActivationCheckpoint"), Some(activations));
    assert_eq!(freed("CpuOffload::activations"), Some(activations));
    // All weights but the largest, which has WIDTH² elements.
    let offloaded = freed("CpuOffload::parameters").unwrap();
    assert!(offloaded.abs_diff(weights - 4 * (WIDTH * WIDTH) as u64) <= 1, "{offloaded}");
    assert_eq!(lines(advice).len(), 4, "SGD has no state, and there are no gradients yet: {error}");
    assert_eq!(advice.next().unwrap().line, "ActivationCheckpoint::new(block) around each block");

    let text = error.to_string();
    assert!(text.starts_with("one row does not fit on Cpu: 8192 bytes asked for, "), "{text}");
    assert!(!text.contains("smaller micro-batch"), "there is none: {text}");
    assert!(
        text.contains("0.01 MiB were missing") && text.contains("0.01 MiB ActivationCheckpoint"),
        "{text}"
    );
    assert_eq!(text.lines().last(), Some("add next: ActivationCheckpoint::new(block) around each block"));
    assert!(support::same(&before, &net.weights()));
    assert!(training.step_batch(&x, |x| Ok(net.loss(x))).unwrap().stepped());
}

#[test]
fn a_failure_in_backward_knows_gradients() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let first = nn::linear(vs.root() / "first", 128, 128, Default::default());
    let last = nn::linear(vs.root() / "last", 128, 128, Default::default());
    let sgd = Sgd::new(&vs, SgdConfig::default()).unwrap();
    let spy = Spy::default();
    let mut training = Stack::of(&vs, sgd).with(MicroBatcher::new()).with(spy.clone()).build().unwrap();
    let x = floats(&[1, 128]);
    let loss = |x: &Tensor| Ok(Loss::mean(x.apply(&first).tanh().apply(&last).square().mean(Kind::Float), 1));
    let _ = training.step_batch(&x, |x| loss(x)).unwrap();
    // One weight's gradient fits, two do not.
    let limit = Limit::new(live() + 3 * 128 * 128 * 2).unwrap();
    let error = training.step_batch(&x, |x| loss(x)).unwrap_err();
    drop(limit);
    assert_eq!(spy.seen(), [(0, true), (0, true)]);
    let (advice, _) = advice_of(&error);
    assert_eq!(advice.peak.as_ref().unwrap().phase.name(), "backward");
    let held = advice.holders.iter().find(|one| one.role == Role::Gradients).map(|one| one.bytes);
    assert_eq!(held, Some(4 * 128 * 129), "{error}");
    let gradients = advice.helps.iter().find(|help| help.line.contains("InBackward")).unwrap();
    assert!(gradients.bytes.is_some_and(|bytes| bytes > 0), "{error}");
}

/// Eight blocks that are wide inside, one row of 2,048 positions: 2 MiB within each, 0.25 between.
struct Blocks {
    vs: nn::VarStore,
    blocks: Vec<Box<dyn Module>>,
}

#[derive(Debug)]
struct Block(nn::Linear, nn::Linear);

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Tensor {
        x.apply(&self.0).tanh().apply(&self.1)
    }
}

impl Blocks {
    fn new(checkpointed: bool) -> Self {
        let vs = nn::VarStore::new(Device::Cpu);
        let block = |i: i64| -> Box<dyn Module> {
            let path = vs.root() / i;
            let up = nn::linear(&path / "up", 32, 256, Default::default());
            let block = Block(up, nn::linear(&path / "down", 256, 32, Default::default()));
            if checkpointed { Box::new(ActivationCheckpoint::new(block)) } else { Box::new(block) }
        };
        let blocks = (0..8).map(block).collect();
        Self { blocks, vs }
    }

    /// What one row takes where there is room for all.
    fn peak_with(&self, with: impl FnOnce(StackBuilder) -> StackBuilder) -> u64 {
        let before = live();
        let (error, peak) = peak_of(Device::Cpu, || self.try_with(1 << 40, with)).unwrap();
        assert!(error.is_none(), "{error:?}");
        peak - before
    }

    /// Trains under a limit; the error, if one row does not fit.
    fn try_with(&self, room: u64, with: impl FnOnce(StackBuilder) -> StackBuilder) -> Option<Error> {
        let sgd = Sgd::new(&self.vs, SgdConfig::default().lr(0.01)).unwrap();
        let mut training = with(Stack::of(&self.vs, sgd).with(MicroBatcher::new())).build().unwrap();
        let x = floats(&[1, 2048, 32]);
        let _limit = Limit::new(live() + room).unwrap();
        let outcome = training.step_batch(&x, |x| {
            let first = self.blocks[0].forward(x);
            let y = self.blocks[1..].iter().fold(first, |x, block| block.forward(&x));
            Ok(Loss::mean(y.square().mean(Kind::Float), 1))
        });
        match outcome {
            Ok(outcome) => {
                assert!(outcome.stepped());
                None
            }
            Err(error) => Some(error),
        }
    }
}

#[test]
fn adding_the_line_that_it_names_makes_the_row_fit() {
    let _guard = serial();
    let autocast = |builder: StackBuilder| builder.with(AmpScaler::bf16());
    let next = |error: &Error| advice_of(error).0.next().unwrap().line.clone();
    // What products in bf16 take depends on the processor's instructions: the rooms lie between measured peaks.
    let plain = Blocks::new(false).peak_with(|builder| builder);
    let half = Blocks::new(false).peak_with(autocast);
    let replayed = Blocks::new(true).peak_with(autocast);
    assert!(plain > half && half > replayed, "{plain} {half} {replayed}");
    let (first, second) = (plain.midpoint(half), half.midpoint(replayed));

    let error = Blocks::new(false).try_with(first, |builder| builder).unwrap();
    assert_eq!(next(&error), ".with(AmpScaler::bf16())", "{error}");
    assert!(Blocks::new(false).try_with(first, autocast).is_none());

    let error = Blocks::new(false).try_with(second, autocast).unwrap();
    assert_eq!(next(&error), "ActivationCheckpoint::new(block) around each block", "{error}");
    assert!(Blocks::new(true).try_with(second, autocast).is_none());
}

/// What is named for two layers whose second gradient, of the first weight, does not fit.
fn named(half: bool, with: &dyn Fn(StackBuilder) -> StackBuilder) -> String {
    let x = floats(&[1, 64]);
    let try_in = |room: u64| {
        let mut vs = nn::VarStore::new(Device::Cpu);
        let first = nn::linear(vs.root() / "first", 64, 64, Default::default());
        let last = nn::linear(vs.root() / "last", 64, 64, Default::default());
        if half {
            vs.bfloat16();
        }
        let sgd = Sgd::new(&vs, SgdConfig::default()).unwrap();
        let mut training = with(Stack::of(&vs, sgd).with(MicroBatcher::new())).build().unwrap();
        let x = if half { x.to_kind(Kind::BFloat16) } else { x.shallow_clone() };
        let mut armed = None;
        let outcome = training.step_batch(&x, |x| {
            let loss = x.apply(&first).apply(&last).square().mean(Kind::Float);
            drop(armed.take());
            armed = Some(Limit::new(live() + room).unwrap());
            Ok(Loss::mean(loss, 1))
        });
        outcome.err()
    };
    let error = (5..20).rev().find_map(|thousands| try_in(2_000 * thousands)).unwrap();
    let (advice, _) = advice_of(&error);
    assert!(half || advice.holders.iter().any(|one| one.role == Role::Gradients), "{error}");
    lines(advice).join("; ")
}

#[test]
fn nothing_is_named_that_build_refuses_there() {
    let _guard = serial();
    let plain = named(false, &|builder| builder);
    let all = [
        "AmpScaler",
        "ActivationCheckpoint",
        "CpuOffload::activations",
        "InBackward",
        "CpuOffload::parameters",
    ];
    for line in all {
        assert!(plain.contains(line), "{line} {plain}");
    }
    let clipped = named(false, &|builder| builder.with(GradClip::norm(1.0)));
    assert!(!clipped.contains("InBackward") && clipped.contains("AmpScaler"), "{clipped}");
    let scaled = named(false, &|builder| builder.with(AmpScaler::fp16()));
    assert!(!scaled.contains("InBackward") && !scaled.contains("AmpScaler"), "{scaled}");
    let kept = named(false, &|builder| builder.with(Rollback::micro_batch()));
    assert!(!kept.contains("InBackward"), "{kept}");
    let masters = named(true, &|builder| builder.with(MasterWeights::fp32()));
    let refused = ["InBackward", "AmpScaler", "CpuOffload::parameters"];
    assert!(refused.iter().all(|line| !masters.contains(line)), "{masters}");
    let offloaded = named(false, &|builder| {
        builder.with(CpuOffload::activations().disk(std::env::temp_dir()).min_bytes(0))
    });
    assert!(!offloaded.contains("CpuOffload::activations"), "{offloaded}");
}

#[test]
fn smaller_moments_are_offered_with_their_bytes() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let layer = nn::linear(vs.root(), 128, 100, Default::default());
    let said = |optimizer: Box<dyn Optimizer>| {
        let mut training = Stack::of(&vs, optimizer).with(MicroBatcher::new()).build().unwrap();
        let _limit = Limit::new(live() + 60_000).unwrap();
        let x = floats(&[1, 128]);
        let error = training
            .step_batch(&x, |x| Ok(Loss::mean(x.repeat([200, 1]).apply(&layer).mean(Kind::Float), 1)))
            .unwrap_err();
        let (advice, _) = advice_of(&error);
        let bytes =
            |name: &str| advice.helps.iter().find(|help| help.line.contains(name)).map(|help| help.bytes);
        (bytes("moments(Kind::BFloat16)"), bytes("AdamW8bit"))
    };
    let state = |mut optimizer: Box<dyn Optimizer>| {
        optimizer.allocate().unwrap();
        optimizer.state_bytes()
    };
    let adamw = |config: AdamWConfig| -> Box<dyn Optimizer> { Box::new(AdamW::new(&vs, config).unwrap()) };
    let bf16 = AdamWConfig::default().moments(Kind::BFloat16);
    let quantised: Box<dyn Optimizer> = Box::new(AdamW8bit::new(&vs, AdamW8bitConfig::default()).unwrap());
    let all = state(adamw(AdamWConfig::default()));
    let saved = (all - state(adamw(bf16)), all - state(quantised));
    assert_eq!(said(adamw(AdamWConfig::default())), (Some(Some(saved.0)), Some(Some(saved.1))));
    assert_eq!(said(adamw(bf16)), (None, None));
}

/// Where another recording leaves no room for ours, nothing was seen.
#[test]
fn without_a_recording_bytes_are_unknown_and_advice_is_there() {
    let _guard = serial();
    let net = Net::new();
    let mut training = net.stack();
    // The ring is full after a few events, so what the one row did is lost.
    let small = memfit::memory::Recording::with_capacity(1).unwrap();
    let limit = Limit::new(live() + 6_000).unwrap();
    let error = training
        .step_batch(&floats(&[4, WIDTH]), |x| {
            let wide = (x.repeat([1, 32]) * net.vs.trainable_variables()[0].sum(Kind::Float)).exp();
            Ok(Loss::mean(wide.mean(Kind::Float), 1))
        })
        .unwrap_err();
    drop((limit, small));
    if matches!(error, Error::OutOfMemory { .. }) {
        panic!("not explained: {error}");
    }
    let (advice, _) = advice_of(&error);
    let text = error.to_string();
    assert!(advice.peak.is_none(), "{text}");
    assert!(text.contains("unknown ActivationCheckpoint"), "{text}");
    assert!(!text.contains("nothing in the crate"), "{text}");
    assert!(text.lines().last().unwrap().starts_with("add next: "), "{text}");
}
