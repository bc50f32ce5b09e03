//! What a strategy or an optimizer of the user's own can rely on, and what the driver does
//! where they fail.

mod support;

use memfit::offload::CpuOffload;
use memfit::optim::{AdamW, AdamWConfig, GroupOptions, Optimizer, ParamGroup, Sgd, SgdConfig};
use memfit::state::StateVisitor;
use memfit::strategies::{GradAccumulator, MasterWeights};
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};
use memfit::{
    Error, Failure, Loss, Named, Numbers, Place, Recovery, Relation, Result, SkipReason, Stack, StepOutcome,
    Strategy, Update, Verdict,
};
use support::{copies, same, serial, sgd, slope, values, vector};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// A strategy at one place that says its order against others by number.
#[derive(Debug)]
struct Numbered(u32, &'static str);

impl Strategy for Numbered {
    fn name(&self) -> String {
        self.1.to_owned()
    }
    fn place(&self) -> Place {
        Place::Average
    }
    fn relation(&self, other: &dyn Strategy) -> Relation {
        match (other as &dyn std::any::Any).downcast_ref::<Self>() {
            Some(other) if other.0 == self.0 => Relation::Commutes,
            Some(other) if other.0 > self.0 => Relation::Before,
            Some(other) if other.0 == 0 => Relation::Before,
            _ => Relation::Unknown,
        }
    }
}

#[test]
fn strategies_at_one_place_stand_in_the_order_they_agree_on() {
    let _guard = serial();
    let (vs, _w) = vector(1);
    for order in [[3, 1, 2, 2], [2, 3, 2, 1], [1, 2, 2, 3]] {
        let mut builder = Stack::of(&vs, sgd(&vs));
        for number in order {
            builder = builder.with(Numbered(number, ["", "one", "two", "three"][number as usize]));
        }
        let training = builder.build().unwrap();
        let names: Vec<String> = training.strategies().map(|strategy| strategy.name()).collect();
        assert_eq!(names, ["one", "two", "two", "three"], "{order:?}");
    }
    // Each says that it comes before the other.
    let refused = Stack::of(&vs, sgd(&vs)).with(Numbered(0, "zero")).with(Numbered(1, "one")).build();
    assert!(matches!(refused, Err(Error::Incompatible { .. })), "{refused:?}");
}

/// Votes for twice the weight, as two ranks would, and may skip.
#[derive(Debug)]
struct Vote {
    skip: bool,
}

impl Strategy for Vote {
    fn place(&self) -> Place {
        Place::Watch
    }
    fn agree(&mut self, numbers: &mut Numbers) -> Result<()> {
        numbers.weight *= 2.0;
        numbers.tokens *= 2.0;
        Ok(())
    }
    fn update(
        &mut self,
        phase: &mut memfit::UpdatePhase<'_>,
        next: memfit::NextUpdate<'_>,
    ) -> Result<Verdict> {
        if self.skip { Ok(Verdict::Skipped(SkipReason::Strategy("voted"))) } else { next(phase) }
    }
}

#[test]
fn what_strategies_agree_on_is_what_the_update_uses() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs)).with(Vote { skip: false }).build().unwrap();
    let outcome = training.step_with(|| Ok(Loss::mean(slope(&w, &[8.0]), 3))).unwrap();
    assert!(matches!(outcome, StepOutcome::Stepped { tokens: 6.0, .. }), "{outcome:?}");
    assert_eq!(values(&w), [-4.0]);
    training.strategy_mut::<Vote>().unwrap().skip = true;
    let outcome = training.step_with(|| Ok(Loss::mean(slope(&w, &[8.0]), 3))).unwrap();
    assert!(matches!(outcome, StepOutcome::Skipped { reason: SkipReason::Strategy("voted"), .. }));
    assert_eq!((training.position().steps, training.position().windows), (1, 2));
    assert_eq!(values(&w), [-4.0]);
}

/// Halves the micro-batch after each failure.
#[derive(Debug)]
struct Halving(i64);

impl Strategy for Halving {
    fn place(&self) -> Place {
        Place::Window
    }
    fn split(&mut self, _rows: i64) -> Option<i64> {
        Some(self.0)
    }
    fn retries(&self) -> bool {
        true
    }
    fn recover(&mut self, failure: &Failure<'_>) -> Recovery {
        assert_eq!(failure.rows, Some(self.0));
        self.0 /= 2;
        if self.0 > 0 { Recovery::Retry } else { Recovery::Window }
    }
}

#[test]
fn a_split_that_fails_runs_again_as_a_strategy_says() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs)).with(Halving(8)).build().unwrap();
    let batch = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    let mut rows = Vec::new();
    let outcome = training.step_batch(&batch, |x| {
        rows.push(x.size()[0]);
        if x.size()[0] > 2 {
            return Err(Error::config("test", "too many rows"));
        }
        Ok(Loss::mean((&w * x).mean(Kind::Float), x.size()[0]))
    });
    assert!(outcome.unwrap().stepped());
    assert_eq!(rows, [8, 4, 2, 2, 2, 2]);
    assert_eq!(values(&w), [-4.5]);
    let error = training.step_batch(&batch, |_| Err(Error::config("test", "never"))).unwrap_err();
    assert!(matches!(error, Error::Config { .. }));
}

/// Moves one parameter and then fails.
#[derive(Debug)]
struct Halfway {
    inner: Sgd,
    panics: bool,
}

impl Optimizer for Halfway {
    fn name(&self) -> String {
        "Halfway".to_owned()
    }
    fn groups(&self) -> &[ParamGroup] {
        self.inner.groups()
    }
    fn groups_mut(&mut self) -> &mut [ParamGroup] {
        self.inner.groups_mut()
    }
    fn step(&mut self, update: &Update) -> Result<()> {
        self.inner.step(update)?;
        if self.panics {
            panic!("half-way");
        }
        Err(Error::Poisoned { source: Box::new(Error::config("test", "half-way")) })
    }
    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        self.inner.visit_state(visitor)
    }
}

#[test]
fn a_failure_after_the_first_parameter_moved_poisons_the_stack() {
    let _guard = serial();
    for panics in [false, true] {
        let (vs, w) = vector(1);
        let optimizer = Halfway { inner: sgd(&vs), panics };
        let mut training = Stack::of(&vs, optimizer).build().unwrap();
        let error = training.step_with(|| Ok(Loss::of(slope(&w, &[1.0])))).unwrap_err();
        assert!(matches!(error, Error::Poisoned { .. }), "{error}");
        let refused = training.step_with(|| Ok(Loss::of(slope(&w, &[1.0]))));
        assert!(matches!(refused, Err(Error::CallOrder { .. })), "{refused:?}");
        assert!(matches!(training.state(), Err(Error::CallOrder { .. })));
        assert!(matches!(training.flush(), Err(Error::CallOrder { .. })));
    }
}

#[test]
fn a_batch_that_cannot_be_split_changes_nothing() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let norm = nn::batch_norm1d(vs.root() / "norm", 4, Default::default());
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(2)).build().unwrap();
    let buffers = |training: &Stack| {
        copies(&training.buffers().iter().map(|b| b.tensor.shallow_clone()).collect::<Vec<_>>())
    };
    let loss = |x: &Tensor| Ok(Loss::mean(x.apply_t(&norm, true).square().mean(Kind::Float), x.size()[0]));
    for _ in 0..2 {
        let before = buffers(&training);
        let uneven = (Tensor::randn([10, 4], CPU), Tensor::zeros([9], CPU));
        let next = |training: &mut Stack| training.step_batch(&uneven, |(x, _)| loss(x));
        assert!(matches!(next(&mut training), Err(Error::Config { .. })));
        assert!(same(&before, &buffers(&training)));
        assert!(training.step_batch(&Tensor::randn([8, 4], CPU), loss).unwrap().stepped());
        assert!(!same(&before, &buffers(&training)));
    }
}

#[test]
fn windows_by_tokens_follow_what_a_failure_did() {
    let _guard = serial();
    let run = |failing: &[usize]| {
        let (vs, w) = vector(1);
        let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::tokens(10)).build().unwrap();
        let mut ended = Vec::new();
        for (number, micro) in training.windows((0..7).map(|_| Tensor::ones([4], CPU))).enumerate() {
            let outcome = training.step(micro.unwrap(), |x| {
                if failing.contains(&number) {
                    return Err(Error::config("test", "fails"));
                }
                Ok(Loss::mean((&w * x).mean(Kind::Float), 4))
            });
            if let Ok(StepOutcome::Stepped { tokens, .. }) = outcome {
                ended.push(tokens);
            }
        }
        ended
    };
    assert_eq!(run(&[]), [12.0, 12.0, 4.0]);
    // The second fails: the third and fourth complete the window.
    assert_eq!(run(&[1]), [12.0, 12.0]);
    // The last of the window fails: the next takes its place.
    assert_eq!(run(&[2]), [12.0, 12.0]);
}

#[test]
fn a_flush_inside_a_windows_loop_starts_a_new_window() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let mut training = Stack::of(&vs, sgd(&vs)).with(GradAccumulator::every(4)).build().unwrap();
    let mut ended = Vec::new();
    for (number, micro) in training.windows((0..8).map(|_| Tensor::ones([1], CPU))).enumerate() {
        let mut outcomes =
            vec![training.step(micro.unwrap(), |x| Ok(Loss::mean((&w * x).sum(Kind::Float), 1))).unwrap()];
        if number == 1 {
            outcomes.extend(training.flush().unwrap());
        }
        for outcome in outcomes {
            if let StepOutcome::Stepped { tokens, .. } = outcome {
                ended.push(tokens);
            }
        }
    }
    assert_eq!(ended, [2.0, 4.0, 2.0]);
}

#[test]
fn a_group_added_under_master_weights_trains_and_is_not_added_twice() {
    let _guard = serial();
    let mut vs = nn::VarStore::new(Device::Cpu);
    let a = vs.root().ones("a", &[2]);
    vs.bfloat16();
    let optimizer = AdamW::new(&vs, AdamWConfig::default().lr(0.125).weight_decay(0.0)).unwrap();
    let mut training = Stack::of(&vs, optimizer).with(MasterWeights::fp32()).build().unwrap();
    let b = Tensor::ones([2], (Kind::BFloat16, Device::Cpu)).set_requires_grad(true);
    let loss = || Ok(Loss::of((&a + &b).sum(Kind::Float)));
    let _ = training.step_with(loss).unwrap();
    assert_eq!(values(&b), [1.0, 1.0]);
    training.add_group(vec![Named::new("b", &b)], GroupOptions::default()).unwrap();
    for again in [Named::new("a", &a), Named::new("again", &a), Named::new("b", &Tensor::ones([1], CPU))] {
        assert!(matches!(
            training.add_group(vec![again], GroupOptions::default()),
            Err(Error::Config { .. })
        ));
    }
    assert!(training.step_with(loss).unwrap().stepped());
    // Adam's first step on a constant gradient moves by the rate.
    assert_eq!(values(&b), [0.875, 0.875]);
    let state = training.state().unwrap();
    assert!(state.get("master.b").is_some() && state.get("optimizer.b.exp_avg").is_some());
}

/// Case 42: a tensor under two names of one store.
#[test]
fn a_tied_weight_has_one_name_in_every_process() {
    let _guard = serial();
    for _ in 0..20 {
        let vs = nn::VarStore::new(Device::Cpu);
        let w = vs.root().zeros("out", &[1]);
        let _ = vs.root().add("in", w.shallow_clone(), true);
        let mut training = Stack::of(&vs, sgd(&vs)).build().unwrap();
        let names: Vec<&str> = training.parameters().iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["in"]);
        let _ = training.step_with(|| Ok(Loss::of(slope(&w, &[1.0])))).unwrap();
        assert_eq!(values(&w), [-1.0]);
    }
}

#[test]
fn bare_tensors_get_positional_names() {
    let _guard = serial();
    let tensors: Vec<Tensor> = (0..2).map(|_| Tensor::zeros([1], CPU).set_requires_grad(true)).collect();
    let none: [Tensor; 0] = [];
    let optimizer = Sgd::new(&tensors, SgdConfig::default()).unwrap();
    let training = Stack::tensors(&tensors, &none[..], optimizer).build().unwrap();
    let names: Vec<&str> = training.parameters().iter().map(|one| one.name.as_str()).collect();
    assert_eq!(names, ["0", "1"]);
}

#[test]
fn offloaded_weights_train_save_and_load_in_a_stack_and_refuse_master_weights() {
    let _guard = serial();
    let data: Vec<Tensor> = (0..4).map(|_| Tensor::randn([4, 16], CPU)).collect();
    let train = |offloaded: bool| {
        memfit::tch::manual_seed(6);
        let vs = nn::VarStore::new(Device::Cpu);
        let block = nn::linear(vs.root() / "block", 16, 16, Default::default());
        let weights = vec![block.ws.shallow_clone()];
        let block: Box<dyn Module> = if offloaded {
            Box::new(CpuOffload::parameters(block, &weights).disk(std::env::temp_dir()).unwrap())
        } else {
            Box::new(block)
        };
        let optimizer = AdamW::new(&vs, AdamWConfig::default()).unwrap();
        let optimizer = CpuOffload::optimizer(optimizer).resident().unwrap();
        let mut training = Stack::of(&vs, optimizer).build().unwrap();
        let mut states = Vec::new();
        for x in &data {
            states.push(training.state().unwrap());
            let _ = training
                .step_with(|| Ok(Loss::of(block.forward(x).tanh().square().sum(Kind::Float))))
                .unwrap();
        }
        // Back to the second step, and the rest again.
        training.load_state(&states[1]).unwrap();
        for x in &data[1..] {
            let _ = training
                .step_with(|| Ok(Loss::of(block.forward(x).tanh().square().sum(Kind::Float))))
                .unwrap();
        }
        let state = training.state().unwrap();
        ["parameters.block.weight", "parameters.block.bias"].map(|name| match state.get(name) {
            Some(memfit::Value::Tensor(tensor)) => tensor.copy(),
            other => panic!("{name}: {other:?}"),
        })
    };
    assert!(same(&train(true), &train(false)));

    let mut vs = nn::VarStore::new(Device::Cpu);
    let block = nn::linear(vs.root() / "block", 16, 16, Default::default());
    vs.bfloat16();
    let weights = vec![block.ws.shallow_clone()];
    let _block = CpuOffload::parameters(block, &weights).disk(std::env::temp_dir()).unwrap();
    let refused = Stack::of(&vs, sgd(&vs)).with(MasterWeights::fp32()).build();
    assert!(matches!(refused, Err(Error::Incompatible { .. })), "{refused:?}");
}
