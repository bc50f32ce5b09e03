//! Updates in backward: the driver's event "gradient final", and `InBackward` on it.

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use memfit::checkpoint::{ActivationCheckpoint, Shared, checkpoint};
use memfit::memory::PeakScope;
use memfit::offload::CpuOffload;
use memfit::optim::{
    AdamW, AdamWConfig, GroupOptions, InBackward, Momentum, Optimizer, ParamGroup, Sgd, SgdConfig,
    TchOptimizer,
};
use memfit::strategies::{AmpScaler, Budget, Cosine, GradAccumulator, GradClip, MasterWeights, Rollback};
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module, nn::ModuleT, nn::OptimizerConfig};
use memfit::{
    Error, Exactness, GradientUse, Heard, Loss, Named, NextUpdate, Place, Ready, Result, SkipReason, Stack,
    StackBuilder, StateVisitor, StepOutcome, Strategy, Update, UpdatePhase, Verdict,
};
use support::{copies, difference, live, same, serial, slope, values, vector};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Two layers in segments, a weight that is used in one of them and outside, a frozen weight,
/// one that only some micro-batches use, one that none does.
struct Model {
    vs: nn::VarStore,
    first: Box<dyn ModuleT>,
    second: Box<dyn ModuleT>,
    tied: Tensor,
    frozen: Tensor,
    rare: Tensor,
}

#[derive(Debug)]
struct Layer {
    linear: nn::Linear,
    norm: nn::BatchNorm,
    tied: Tensor,
}

impl ModuleT for Layer {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        xs.apply(&self.linear).apply_t(&self.norm, train).matmul(&self.tied).relu().dropout(0.25, train)
    }
}

impl Model {
    fn new(checkpointed: bool) -> Self {
        memfit::tch::manual_seed(7);
        let vs = nn::VarStore::new(Device::Cpu);
        let root = vs.root();
        let tied = root.randn("tied", &[6, 6], 0.0, 0.4);
        let layer = |name: &str, tied: &Tensor| -> Box<dyn ModuleT> {
            let layer = Layer {
                linear: nn::linear(&root / name / "linear", 6, 6, Default::default()),
                norm: nn::batch_norm1d(&root / name / "norm", 6, Default::default()),
                tied: tied.shallow_clone(),
            };
            if checkpointed {
                Box::new(ActivationCheckpoint::with_train(layer).checked())
            } else {
                Box::new(layer)
            }
        };
        let (first, second) = (layer("first", &tied), layer("second", &tied));
        let frozen = root.randn("frozen", &[6, 6], 0.0, 0.4).set_requires_grad(false);
        let rare = root.randn("rare", &[6], 0.0, 0.4);
        let _ = root.ones("never", &[3]);
        Self { first, second, tied, frozen, rare, vs }
    }

    /// `rare` joins in only where it is asked for.
    fn loss(&self, x: &Tensor, rare: bool) -> Tensor {
        let hidden = self.second.forward_t(&self.first.forward_t(x, true), true);
        let out = hidden.matmul(&self.frozen).matmul(&self.tied.tr());
        let out = if rare { out * &self.rare } else { out };
        out.to_kind(Kind::Float).square().mean(Kind::Float)
    }

    fn weights(&self) -> Vec<Tensor> {
        let mut named: Vec<_> = self.vs.variables().into_iter().collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        copies(&named.into_iter().map(|(_, tensor)| tensor).collect::<Vec<_>>())
    }
}

fn adamw(vs: &nn::VarStore) -> AdamW {
    AdamW::new(vs, AdamWConfig::default().lr(0.05).epsilon(1e-2).weight_decay(0.1)).unwrap()
}

fn momentum() -> SgdConfig {
    SgdConfig::default().lr(0.05).momentum(0.9).weight_decay(0.01)
}

fn heavy(vs: &nn::VarStore) -> Sgd {
    Sgd::new(vs, momentum()).unwrap()
}

fn plain(vs: &nn::VarStore) -> Sgd {
    Sgd::new(vs, SgdConfig::default().lr(0.05).weight_decay(0.01)).unwrap()
}

type Maker = fn(&nn::VarStore) -> Box<dyn Optimizer>;

const OPTIMIZERS: [(&str, Maker); 4] = [
    ("AdamW", |vs| Box::new(adamw(vs))),
    ("momentum", |vs| Box::new(heavy(vs))),
    ("plain", |vs| Box::new(plain(vs))),
    ("nesterov", |vs| Box::new(Sgd::new(vs, SgdConfig::default().lr(0.05).nesterov(0.9)).unwrap())),
];

fn batches(rows: &[i64]) -> Vec<Tensor> {
    memfit::tch::manual_seed(5);
    rows.iter().map(|rows| Tensor::randn([*rows, 6], CPU)).collect()
}

/// Trains over the batches; `rare` is used in every batch whose number `uses` names.
fn train(training: &mut Stack, model: &Model, rows: &[i64], uses: fn(usize) -> bool) -> Result<Vec<Tensor>> {
    let data: Vec<Tensor> = batches(rows);
    memfit::tch::manual_seed(9);
    let mut seen = 0;
    for micro in training.windows(data) {
        let _ = training.step(micro?, |x| {
            seen += 1;
            Ok(Loss::mean(model.loss(x, uses(seen - 1)), x.size()[0]))
        })?;
    }
    Ok(model.weights())
}

/// Weights after training with and without updates in backward, with the same strategies.
fn pair(
    make: Maker,
    checkpointed: bool,
    rows: &[i64],
    uses: fn(usize) -> bool,
    with: fn(StackBuilder) -> StackBuilder,
) -> (Vec<Tensor>, Vec<Tensor>) {
    let after = Model::new(checkpointed);
    let mut training = with(Stack::of(&after.vs, make(&after.vs))).build().unwrap();
    let wanted = train(&mut training, &after, rows, uses).unwrap();
    drop(training);
    let model = Model::new(checkpointed);
    let mut training = with(Stack::of(&model.vs, InBackward::new(make(&model.vs)).unwrap())).build().unwrap();
    let got = train(&mut training, &model, rows, uses).unwrap();
    (wanted, got)
}

mod equivalence {
    use super::*;

    /// Cases 41, 42 and 47: tied, absent and frozen parameters.
    #[test]
    fn every_optimizer_moves_as_it_does_after_backward() {
        let _guard = serial();
        for (name, make) in OPTIMIZERS {
            for checkpointed in [false, true] {
                let (wanted, got) =
                    pair(make, checkpointed, &[4, 4, 3, 5], |batch| batch % 2 == 0, |with| with);
                assert!(same(&wanted, &got), "{name}, checkpointed: {checkpointed}");
            }
        }
    }

    /// Case 48.
    #[test]
    fn precision_schedules_and_offload_change_nothing() {
        let _guard = serial();
        let with: [fn(StackBuilder) -> StackBuilder; 3] = [
            |with| with.with(AmpScaler::bf16()).with(Cosine::new(8).warm_up(2)),
            |with| with.with(CpuOffload::activations().disk(std::env::temp_dir()).min_bytes(0)),
            |with| with.with(Budget::parse("1GiB").unwrap()).with(Cosine::new(4)),
        ];
        for (name, make) in OPTIMIZERS {
            for (index, with) in with.into_iter().enumerate() {
                let (wanted, got) = pair(make, index != 1, &[4, 4, 3, 5], |_| true, with);
                assert!(same(&wanted, &got), "{name}, stack {index}");
            }
        }
    }

    #[test]
    fn state_on_disk_arrives_in_backward() {
        let _guard = serial();
        for (name, make) in OPTIMIZERS {
            let after = Model::new(true);
            let mut training = Stack::of(&after.vs, make(&after.vs)).build().unwrap();
            let wanted = train(&mut training, &after, &[4, 3, 5], |batch| batch != 1).unwrap();
            for disk in [false, true] {
                let model = Model::new(true);
                let home = CpuOffload::optimizer(make(&model.vs));
                let away = if disk { home.disk(std::env::temp_dir()) } else { home.resident() }.unwrap();
                let observer = away.observer();
                let mut training = Stack::of(&model.vs, InBackward::new(away).unwrap()).build().unwrap();
                let got = train(&mut training, &model, &[4, 3, 5], |batch| batch != 1).unwrap();
                assert!(same(&wanted, &got), "{name}, on disk: {disk}");
                assert_eq!(observer.moved().in_bytes > 0, disk && name != "plain", "{name}");
            }
        }
    }

    /// Case 41: windows, a parameter absent from the last micro-batch or from all.
    #[test]
    fn plain_sgd_in_windows_is_bitwise() {
        let _guard = serial();
        let with: [fn(StackBuilder) -> StackBuilder; 2] =
            [|with| with.with(GradAccumulator::every(3)), |with| with.with(GradAccumulator::tokens(9))];
        for with in with {
            let uses = |batch: usize| batch == 1 || batch == 5;
            let (wanted, got) = pair(|vs| Box::new(plain(vs)), true, &[4, 4, 2, 3, 5, 4, 6], uses, with);
            assert!(same(&wanted, &got));
        }
    }

    /// Case 41: the momentum takes every micro-batch's gradient; the last window is short.
    #[test]
    fn momentum_in_windows_is_the_same_sum() {
        let _guard = serial();
        let makers: [Maker; 3] = [
            |vs| Box::new(heavy(vs)),
            |vs| Box::new(Sgd::new(vs, momentum().dampening(0.5)).unwrap()),
            |vs| Box::new(CpuOffload::optimizer(heavy(vs)).disk(std::env::temp_dir()).unwrap()),
        ];
        for make in makers {
            // `rare` is in an early micro-batch only, in none of the second window's, in the last one's.
            let uses = |batch: usize| [0, 6, 7].contains(&batch);
            let (wanted, got) = pair(make, true, &[4; 8], uses, |with| with.with(GradAccumulator::every(3)));
            for (a, b) in wanted.iter().zip(&got) {
                assert!(difference(a, b) < 2e-6, "{}", difference(a, b));
            }
        }
    }

    /// Both by arithmetic: g = 2 then 4 in a window of two, twice.
    #[test]
    fn a_dampened_momentum_in_windows_follows_the_formula() {
        let _guard = serial();
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
            let mut vs = nn::VarStore::new(Device::Cpu);
            let w = vs.root().zeros("w", &[1]);
            vs.set_kind(kind);
            let config = SgdConfig::default().lr(1.0).momentum(0.5).dampening(0.25);
            let optimizer = InBackward::new(Sgd::new(&vs, config).unwrap()).unwrap();
            let mut training = Stack::of(&vs, optimizer).with(GradAccumulator::every(2)).build().unwrap();
            for factor in [2.0, 4.0, 2.0, 4.0] {
                let _ = training.step_with(|| Ok(Loss::mean((&w * factor).sum(kind), 1))).unwrap();
                assert!(!w.grad().defined(), "the gradient is in the momentum");
            }
            // v = 3 undampened, then 0.5 · 3 + 0.75 · 3.
            assert_eq!(values(&w), [-(3.0 + 3.75)]);
        }
    }

    #[test]
    fn a_whole_batch_splits_into_equal_micro_batches() {
        let _guard = serial();
        let run = |early: bool| {
            let model = nn::VarStore::new(Device::Cpu);
            memfit::tch::manual_seed(1);
            let layer = nn::linear(model.root(), 6, 3, Default::default());
            let builder = if early {
                Stack::of(&model, InBackward::new(heavy(&model)).unwrap())
            } else {
                Stack::of(&model, heavy(&model))
            };
            let mut training = builder.with(GradAccumulator::every(4)).build().unwrap();
            for batch in batches(&[8, 12]) {
                let outcome = training.step_batch(&batch, |x| {
                    Ok(Loss::mean(layer.forward(x).square().mean(Kind::Float), x.size()[0]))
                });
                assert!(outcome.unwrap().stepped());
            }
            copies(&model.trainable_variables())
        };
        for (a, b) in run(false).iter().zip(&run(true)) {
            assert!(difference(a, b) < 1e-6);
        }
    }

    /// A transposed leaf gets a gradient with the strides of the leaf; one that is computed by a
    /// transposed product does not.
    #[test]
    fn strides_do_not_matter_to_a_momentum_in_windows() {
        let _guard = serial();
        let run = |early: bool| {
            memfit::tch::manual_seed(1);
            let w = Tensor::randn([5, 300], CPU).tr().set_requires_grad(true);
            let none: [Tensor; 0] = [];
            let list = vec![Named::new("w", &w)];
            let sgd = Sgd::new(&list, momentum()).unwrap();
            let builder = if early {
                Stack::tensors(&list, &none[..], InBackward::new(sgd).unwrap())
            } else {
                Stack::tensors(&list, &none[..], sgd)
            };
            let mut training = builder.with(GradAccumulator::every(2)).build().unwrap();
            for _ in 0..4 {
                let x = Tensor::randn([7, 300], CPU);
                let _ = training.step_with(|| Ok(Loss::mean(x.matmul(&w).square().mean(Kind::Float), 1)));
            }
            copies(&[w])
        };
        assert!(difference(&run(false)[0], &run(true)[0]) < 1e-6);
    }

    #[test]
    fn added_and_unfrozen_parameters_join_in() {
        let _guard = serial();
        let vs = nn::VarStore::new(Device::Cpu);
        let a = vs.root().zeros("a", &[1]);
        let b = vs.root().zeros("b", &[1]).set_requires_grad(false);
        let optimizer = InBackward::new(Sgd::new(&vs, SgdConfig::default().lr(1.0)).unwrap()).unwrap();
        let mut training = Stack::of(&vs, optimizer).build().unwrap();
        let c = Tensor::zeros([1], CPU).set_requires_grad(true);
        let loss = || Ok(Loss::of((&a + &b + &c).sum(Kind::Float)));
        let _ = training.step_with(loss).unwrap();
        let _ = b.set_requires_grad(true);
        training.add_group(vec![Named::new("c", &c)], GroupOptions::default().lr(0.5)).unwrap();
        let _ = training.step_with(loss).unwrap();
        assert_eq!((values(&a), values(&b), values(&c)), (vec![-2.0], vec![-1.0], vec![-0.5]));
    }
}

/// Notes what it is told; moves nothing.
#[derive(Debug)]
struct Recorder {
    inner: Sgd,
    wanted: GradientUse,
    log: Arc<Mutex<Vec<String>>>,
    then: fn(&Ready) -> Result<Heard>,
}

impl Recorder {
    fn new(vs: &nn::VarStore, wanted: GradientUse, then: fn(&Ready) -> Result<Heard>) -> Self {
        Self { inner: plain(vs), wanted, log: Arc::default(), then }
    }
}

impl Optimizer for Recorder {
    fn name(&self) -> String {
        "Recorder".to_owned()
    }
    fn groups(&self) -> &[ParamGroup] {
        self.inner.groups()
    }
    fn groups_mut(&mut self) -> &mut [ParamGroup] {
        self.inner.groups_mut()
    }
    fn step(&mut self, _: &Update) -> Result<()> {
        self.log.lock().unwrap().push("step".to_owned());
        Ok(())
    }
    fn visit_state(&mut self, _: &mut StateVisitor<'_>) -> Result<()> {
        Ok(())
    }
    fn gradients(&self) -> GradientUse {
        self.wanted
    }
    fn gradient_ready(&mut self, ready: &Ready) -> Result<Heard> {
        let name = self.groups()[ready.group].parameters()[ready.index].name.clone();
        let Ready { micro, update, .. } = ready;
        self.log.lock().unwrap().push(format!("{name} {} ÷{}", micro.index, update.divisor));
        (self.then)(ready)
    }
    fn folds_divisor(&self) -> bool {
        true
    }
}

/// A chain of three scalars: `c` is final first.
fn chain() -> (nn::VarStore, impl Fn() -> Tensor) {
    let vs = nn::VarStore::new(Device::Cpu);
    let made = ["a", "b", "c"].map(|name| vs.root().ones(name, &[1]));
    (vs, move || ((made[0].exp() * &made[1]).exp() * &made[2]).sum(Kind::Float))
}

mod order {
    use super::*;

    #[test]
    fn gradients_are_told_of_as_they_become_final() {
        let _guard = serial();
        let run = |wanted, master: bool| {
            let (vs, loss) = chain();
            let recorder = Recorder::new(&vs, wanted, |_| Ok(Heard::Noted));
            let log = recorder.log.clone();
            let builder = Stack::of(&vs, recorder).with(GradAccumulator::every(2));
            let builder = if master { builder.with(MasterWeights::fp32()) } else { builder };
            let mut training = builder.build().unwrap();
            for weight in [1, 1, 2, 2] {
                let _ = training.step_with(|| Ok(Loss::mean(loss(), weight))).unwrap();
            }
            let log = log.lock().unwrap().join(", ");
            log
        };
        let last = "c 1 ÷2, b 1 ÷2, a 1 ÷2, step";
        assert_eq!(run(GradientUse::AtUpdate, false), "step, step");
        assert_eq!(run(GradientUse::Announced, false), [last; 2].join(", "));
        assert_eq!(run(GradientUse::WhenFinal, false), [last; 2].join(", "));
        let each = format!("c 0 ÷2, b 0 ÷2, a 0 ÷2, {last}");
        assert_eq!(run(GradientUse::EachMicroBatch, false), [each.as_str(); 2].join(", "));
        // Gradients that go elsewhere after backward are not final in it.
        assert_eq!(run(GradientUse::Announced, true), "step, step");
    }

    /// Offloaded state is announced, and parameters move, in the order that gradients got final.
    #[test]
    fn offloaded_state_is_updated_in_the_order_of_backward() {
        let _guard = serial();
        let (vs, loss) = chain();
        let steps = Steps { inner: plain(&vs), order: Arc::default(), state: Vec::new() };
        let order = steps.order.clone();
        let away = CpuOffload::optimizer(steps).disk(std::env::temp_dir()).unwrap();
        let mut training = Stack::of(&vs, away).build().unwrap();
        let _ = training.step_with(|| Ok(Loss::of(loss()))).unwrap();
        assert_eq!(*order.lock().unwrap(), ["c", "b", "a"]);
    }

    /// Notes in which order its parameters move.
    #[derive(Debug)]
    struct Steps {
        inner: Sgd,
        order: Arc<Mutex<Vec<String>>>,
        state: Vec<Tensor>,
    }

    impl Optimizer for Steps {
        fn name(&self) -> String {
            "Steps".to_owned()
        }
        fn groups(&self) -> &[ParamGroup] {
            self.inner.groups()
        }
        fn groups_mut(&mut self) -> &mut [ParamGroup] {
            self.inner.groups_mut()
        }
        fn step(&mut self, update: &Update) -> Result<()> {
            self.inner.step(update)
        }
        fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
            self.inner.visit_state(visitor)
        }
        fn allocate(&mut self) -> Result<()> {
            self.state.resize_with(3, || Tensor::zeros([4], CPU));
            Ok(())
        }
        fn begin(&mut self, update: &Update) -> Result<()> {
            self.inner.begin(update)
        }
        fn step_parameter(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
            self.order.lock().unwrap().push(self.groups()[group].parameters()[index].name.clone());
            self.inner.step_parameter(group, index, update)
        }
        fn state_of(&mut self, _: usize, index: usize) -> Vec<&mut Tensor> {
            self.state.get_mut(index).into_iter().collect()
        }
        fn folds_divisor(&self) -> bool {
            true
        }
    }

    /// Weights that are offloaded are updated before they leave: one way home per step.
    #[test]
    fn offloaded_weights_move_before_they_leave() {
        let _guard = serial();
        let run = |early: bool| {
            let vs = nn::VarStore::new(Device::Cpu);
            memfit::tch::manual_seed(1);
            let layer = nn::linear(vs.root(), 8, 8, Default::default());
            let weights = vs.trainable_variables();
            let away = CpuOffload::parameters(layer, &weights).disk(std::env::temp_dir()).unwrap();
            let state = CpuOffload::optimizer(adamw(&vs)).resident().unwrap();
            let builder =
                if early { Stack::of(&vs, InBackward::new(state).unwrap()) } else { Stack::of(&vs, state) };
            let mut training = builder.build().unwrap();
            let moved = |away: &memfit::offload::ParameterOffload<nn::Linear>| {
                (away.moved().in_bytes, away.moved().out_bytes)
            };
            let mut traffic = Vec::new();
            for x in batches(&[4, 4, 4]).iter().map(|x| x.pad([0, 2], "constant", 0.0)) {
                let before = moved(&away);
                let _ =
                    training.step_with(|| Ok(Loss::of(away.forward(&x).square().mean(Kind::Float)))).unwrap();
                let after = moved(&away);
                traffic.push((after.0 - before.0, after.1 - before.1));
            }
            drop((training, away));
            (copies(&weights), traffic)
        };
        let ((wanted, late), (got, early)) = (run(false), run(true));
        assert!(same(&wanted, &got));
        let bytes = 4 * (8 * 8 + 8);
        // Forward and backward bring them, the update finds them here.
        assert_eq!(late, [(3 * bytes, bytes); 3]);
        assert_eq!(early, [(2 * bytes, bytes); 3]);
    }
}

mod cost {
    use super::*;

    /// Bytes at a step's peak above those before it.
    fn above(training: &mut Stack, loss: impl Fn() -> Result<Loss>) -> u64 {
        let _ = training.step_with(&loss).unwrap();
        let before = live();
        let peak = PeakScope::new(Device::Cpu).unwrap();
        let _ = training.step_with(&loss).unwrap();
        peak.peak() - before
    }

    /// Case 47. Square layers on one row: activations are small, and the first layer, whose
    /// gradients are made last, is the largest.
    #[test]
    fn gradients_take_the_bytes_of_the_largest_layer() {
        let _guard = serial();
        let widths = [[128i64, 96], [96, 64], [64, 64], [64, 8]];
        let run = |early: bool| {
            let vs = nn::VarStore::new(Device::Cpu);
            let layers: Vec<nn::Linear> = widths
                .iter()
                .enumerate()
                .map(|(index, [from, to])| nn::linear(vs.root() / index, *from, *to, Default::default()))
                .collect();
            let x = Tensor::ones([1, 128], CPU);
            let builder = if early {
                Stack::of(&vs, InBackward::new(adamw(&vs)).unwrap())
            } else {
                Stack::of(&vs, adamw(&vs))
            };
            let mut training = builder.build().unwrap();
            above(&mut training, || {
                let y = layers.iter().fold(x.shallow_clone(), |x, layer| layer.forward(&x).tanh());
                Ok(Loss::of(y.sum(Kind::Float)))
            })
        };
        let bytes = widths.map(|[from, to]| 4 * (from * to + to) as u64);
        let (late, early) = (run(false), run(true));
        // What one layer's backward makes at once: both gradients of the layer.
        assert_eq!(late - early, bytes.iter().sum::<u64>() - bytes[0]);
        let activations = 2 * 4 * widths.iter().map(|[from, to]| (from + to) as u64).sum::<u64>();
        assert!((bytes[0]..bytes[0] + activations).contains(&early), "{early} against {}", bytes[0]);
    }

    #[test]
    fn a_momentum_in_windows_keeps_no_gradient_between_micro_batches() {
        let _guard = serial();
        let vs = nn::VarStore::new(Device::Cpu);
        let layer = nn::linear(vs.root(), 64, 64, Default::default());
        let x = Tensor::ones([1, 64], CPU);
        let loss = || Ok(Loss::mean(layer.forward(&x).square().mean(Kind::Float), 1));
        let optimizer = InBackward::new(heavy(&vs)).unwrap();
        let mut training = Stack::of(&vs, optimizer).with(GradAccumulator::every(3)).build().unwrap();
        for _ in 0..3 {
            let _ = training.step_with(loss).unwrap();
        }
        let before = live();
        let _ = training.step_with(loss).unwrap();
        // The window's loss, a number.
        assert!(live() - before <= 64, "{}", live() - before);
        let _ = training.flush().unwrap_err();
    }

    #[test]
    fn windows_hold_a_whole_window_where_its_length_matters_and_two_batches_elsewhere() {
        let _guard = serial();
        let alive = |make: Maker| {
            let taken = Arc::new(AtomicUsize::new(0));
            let counter = taken.clone();
            let (vs, w) = vector(1);
            let mut training = Stack::of(&vs, InBackward::new(make(&vs)).unwrap())
                .with(GradAccumulator::every(4))
                .build()
                .unwrap();
            let data = (0..6).map(move |_| {
                counter.fetch_add(1, Ordering::Relaxed);
                Tensor::ones([1], CPU)
            });
            let mut seen = Vec::new();
            for micro in training.windows(data) {
                let micro = micro.unwrap();
                let (taken, last, short) = (taken.load(Ordering::Relaxed), micro.last, micro.short);
                seen.push((taken, last, short));
                let _ = training.step(micro, |x| Ok(Loss::mean((&w * x).sum(Kind::Float), 1))).unwrap();
            }
            seen
        };
        let (no, yes) = (false, true);
        assert_eq!(
            alive(|vs| Box::new(heavy(vs))),
            [(4, no, no), (4, no, no), (4, no, no), (4, yes, no), (6, no, no), (6, yes, yes)]
        );
        assert_eq!(
            alive(|vs| Box::new(plain(vs))),
            [(2, no, no), (3, no, no), (4, no, no), (5, yes, no), (6, no, no), (6, yes, yes)]
        );
    }

    #[test]
    fn hundred_steps_keep_nothing_alive() {
        let _guard = serial();
        let model = Model::new(true);
        let mut training = Stack::of(&model.vs, InBackward::new(adamw(&model.vs)).unwrap()).build().unwrap();
        let x = Tensor::ones([4, 6], CPU);
        let mut step = || {
            let _ = training.step_with(|| Ok(Loss::of(model.loss(&x, true)))).unwrap();
            live()
        };
        step();
        let after_two = step();
        let after_all = (0..100).map(|_| step()).last();
        assert_eq!(after_all, Some(after_two));
        let dropped = model.vs.trainable_variables();
        assert!(dropped.iter().all(|p| !p.grad().defined()));
    }
}

mod state {
    use super::*;

    #[test]
    fn state_goes_on_to_the_bit_and_is_that_of_the_optimizer() {
        let _guard = serial();
        let rows = [4, 3, 5, 4];
        let straight = Model::new(false);
        let mut training = Stack::of(&straight.vs, adamw(&straight.vs)).build().unwrap();
        let _ = train(&mut training, &straight, &rows, |_| true).unwrap();
        let wanted = train(&mut training, &straight, &rows, |_| true).unwrap();

        let model = Model::new(false);
        let mut training = Stack::of(&model.vs, InBackward::new(adamw(&model.vs)).unwrap()).build().unwrap();
        let _ = train(&mut training, &model, &rows, |_| true).unwrap();
        let state = training.state().unwrap();
        drop(training);
        let other = Model::new(false);
        let mut training = Stack::of(&other.vs, InBackward::new(adamw(&other.vs)).unwrap()).build().unwrap();
        training.load_state(&state).unwrap();
        assert!(same(&wanted, &train(&mut training, &other, &rows, |_| true).unwrap()));
        // Without the wrapper it is the same state.
        let third = Model::new(false);
        let mut training = Stack::of(&third.vs, adamw(&third.vs)).build().unwrap();
        training.load_state(&state).unwrap();
        assert!(same(&wanted, &train(&mut training, &third, &rows, |_| true).unwrap()));
    }

    #[test]
    fn a_window_that_is_in_the_momentum_refuses_a_snapshot() {
        let _guard = serial();
        let (vs, w) = vector(1);
        let optimizer = InBackward::new(heavy(&vs)).unwrap();
        let mut training = Stack::of(&vs, optimizer).with(GradAccumulator::every(2)).build().unwrap();
        assert_eq!(training.optimizer().refuses_snapshot(), None);
        let _ = training.step_with(|| Ok(Loss::mean(slope(&w, &[1.0]), 1))).unwrap();
        assert!(training.optimizer().refuses_snapshot().unwrap().contains("InBackward(Sgd)"));
        assert!(training.state().is_err());
        let _ = training.step_with(|| Ok(Loss::mean(slope(&w, &[1.0]), 1))).unwrap();
        assert_eq!(training.optimizer().refuses_snapshot(), None);
        assert!(training.state().is_ok());
    }

    #[test]
    fn the_stack_says_what_it_keeps_of_exactness() {
        let _guard = serial();
        let (vs, _w) = vector(1);
        let exactness = |optimizer: Box<dyn Optimizer>, every: usize| {
            let optimizer = InBackward::new(optimizer).unwrap();
            Stack::of(&vs, optimizer).with(GradAccumulator::every(every)).build().unwrap().exactness()
        };
        assert_eq!(exactness(Box::new(heavy(&vs)), 2), Exactness::SummationOrder);
        assert_eq!(exactness(Box::new(heavy(&vs)), 1), Exactness::Bitwise);
        assert_eq!(exactness(Box::new(plain(&vs)), 2), Exactness::Bitwise);
    }
}

/// A strategy of a user's that says nothing of what it does.
#[derive(Debug)]
struct Silent(fn(&mut UpdatePhase<'_>, NextUpdate<'_>) -> Result<Verdict>);

impl Strategy for Silent {
    fn place(&self) -> Place {
        Place::Clip
    }
    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        (self.0)(phase, next)
    }
}

mod misuse {
    use super::*;

    fn refusal(builder: StackBuilder, other: &str) {
        match builder.build() {
            Err(Error::Incompatible { left, right, remedy, .. }) => {
                assert!(left.starts_with("InBackward("), "{left}");
                assert!(right.contains(other), "{right} is not {other}");
                assert!(!remedy.is_empty());
            }
            other => panic!("{other:?}"),
        }
    }

    /// Case 41.
    #[test]
    fn what_needs_all_gradients_is_refused_by_name_of_both() {
        let _guard = serial();
        let (vs, _w) = vector(1);
        let early = || Stack::of(&vs, InBackward::new(plain(&vs)).unwrap());
        refusal(early().with(GradClip::norm(1.0)), "GradClip::norm");
        refusal(early().with(GradClip::value(1.0)), "GradClip::value");
        refusal(early().with(AmpScaler::fp16()), "AmpScaler::fp16");
        refusal(early().with(MasterWeights::fp32()), "MasterWeights");
        refusal(early().with(Rollback::micro_batch()), "Rollback");
        refusal(early().with(GradAccumulator::every(2).fp32()), "fp32");
        let window = |optimizer: Box<dyn Optimizer>| Stack::of(&vs, InBackward::new(optimizer).unwrap());
        refusal(window(Box::new(adamw(&vs))).with(GradAccumulator::every(2)), "GradAccumulator::every(2)");
        refusal(window(Box::new(heavy(&vs))).with(GradAccumulator::tokens(2)), "GradAccumulator::tokens(2)");
        let nesterov = Sgd::new(&vs, SgdConfig::default().nesterov(0.9)).unwrap();
        assert_eq!(nesterov.config().kind, Momentum::Nesterov);
        refusal(window(Box::new(nesterov)).with(GradAccumulator::every(2)), "GradAccumulator::every(2)");
        assert!(window(Box::new(adamw(&vs))).with(GradAccumulator::every(1)).build().is_ok());
    }

    #[test]
    fn optimizers_that_cannot_are_refused() {
        let _guard = serial();
        let (vs, _w) = vector(1);
        let tch = TchOptimizer::new(nn::Sgd::default().build(&vs, 0.1).unwrap(), &vs, 0.1).unwrap();
        assert!(matches!(InBackward::new(tch), Err(Error::Unsupported { .. })));
        let twice = InBackward::new(InBackward::new(plain(&vs)).unwrap());
        assert!(matches!(twice, Err(Error::Unsupported { .. })));
        let inside = CpuOffload::optimizer(InBackward::new(plain(&vs)).unwrap()).resident();
        assert!(inside.unwrap_err().to_string().contains("InBackward::new(CpuOffload::optimizer"));
    }

    fn poisoned(error: Error, contains: &str) {
        assert!(matches!(error, Error::Poisoned { .. }), "{error}");
        assert!(error.to_string().contains(contains), "{error}");
    }

    #[test]
    fn a_window_that_turns_out_otherwise_is_poisoned() {
        let _guard = serial();
        let (vs, w) = vector(1);
        let stack = || {
            let optimizer = InBackward::new(heavy(&vs)).unwrap();
            Stack::of(&vs, optimizer).with(GradAccumulator::every(3)).build().unwrap()
        };
        let loss = |n: i32| Ok(Loss::mean(slope(&w, &[1.0]), n));
        let mut training = stack();
        let _ = training.step_with(|| loss(1)).unwrap();
        poisoned(training.flush().unwrap_err(), "windows");
        assert!(matches!(training.step_with(|| loss(1)), Err(Error::CallOrder { .. })));
        let mut training = stack();
        let _ = training.step_with(|| loss(1)).unwrap();
        poisoned(training.step_with(|| loss(2)).unwrap_err(), "equal weight");
        let mut training = stack();
        let _ = training.step_with(|| loss(1)).unwrap();
        poisoned(training.discard().unwrap_err(), "discard");
        // Rows that do not split evenly are refused before anything moves.
        let mut training = stack();
        let uneven = training.step_batch(&Tensor::ones([10, 1], CPU), |x| loss(x.size()[0] as i32));
        assert!(matches!(uneven, Err(Error::Incompatible { .. })), "{uneven:?}");
        assert!(training.step_batch(&Tensor::ones([9, 1], CPU), |_| loss(3)).unwrap().stepped());
    }

    #[test]
    fn a_strategy_that_changes_its_mind_after_parameters_moved_poisons() {
        let _guard = serial();
        let (vs, w) = vector(1);
        let run = |silent: Silent| {
            let optimizer = InBackward::new(plain(&vs)).unwrap();
            let mut training = Stack::of(&vs, optimizer).with(silent).build().unwrap();
            training.step_with(|| Ok(Loss::of(slope(&w, &[1.0])))).unwrap_err()
        };
        let skip = Silent(|_, _| Ok(Verdict::Skipped(SkipReason::Strategy("late"))));
        poisoned(run(skip), "did not call next");
        let clip = Silent(|phase, next| {
            phase.update.divisor *= 2.0;
            next(phase)
        });
        poisoned(run(clip), "divisor");
        let rate = Silent(|phase, next| {
            phase.optimizer.groups_mut()[0].lr = 9.0;
            next(phase)
        });
        poisoned(run(rate), "rate");
    }

    /// Case 29: a weight whose value another node still needs.
    #[test]
    fn a_weight_that_backward_still_needs_is_never_silently_changed() {
        let _guard = serial();
        for checkpointed in [false, true] {
            let run = |early: bool| {
                let vs = nn::VarStore::new(Device::Cpu);
                memfit::tch::manual_seed(3);
                let first = vs.root().randn("first", &[4, 4], 0.0, 1.0);
                let w = vs.root().randn("w", &[4, 4], 0.0, 1.0);
                let x = Tensor::ones([2, 4], CPU);
                let loss = || {
                    let hidden = x.matmul(&first);
                    // The value of `w` is read without a gradient, and again with one.
                    let read = if checkpointed {
                        let shared = Shared::new(w.detach());
                        checkpoint(&shared, &hidden, |w, hidden| hidden.matmul(w).tanh())?
                    } else {
                        hidden.matmul(&w.detach()).tanh()
                    };
                    Ok(Loss::of(read.matmul(&w).sum(Kind::Float)))
                };
                let builder = if early {
                    Stack::of(&vs, InBackward::new(plain(&vs)).unwrap())
                } else {
                    Stack::of(&vs, plain(&vs))
                };
                let outcome = builder.build().unwrap().step_with(loss);
                (outcome.map(|_| ()), copies(&vs.trainable_variables()))
            };
            assert!(run(false).0.is_ok());
            let error = run(true).0.unwrap_err();
            let Error::Poisoned { source } = &error else { panic!("{error}") };
            assert!(matches!(**source, Error::Modified { .. }), "{source}");
        }
    }
}

mod failure {
    use super::*;

    /// A segment whose recompute fails on demand.
    fn failing(w: &Tensor, fails: &Arc<AtomicUsize>) -> impl Fn(&Tensor) -> Result<Tensor> {
        let shared = Shared::new((w.shallow_clone(), fails.clone()));
        move |x| {
            checkpoint(&shared, x, |(w, fails), x| {
                if fails.load(Ordering::Relaxed) > 0 && fails.fetch_add(1, Ordering::Relaxed) > 1 {
                    panic!("in recompute");
                }
                (x * w).tanh()
            })
        }
    }

    #[test]
    fn a_backward_that_fails_before_anything_moved_leaves_everything_and_after_it_poisons() {
        let _guard = serial();
        for moved in [false, true] {
            let vs = nn::VarStore::new(Device::Cpu);
            let a = vs.root().ones("a", &[2]);
            let b = vs.root().ones("b", &[2]);
            let fails = Arc::new(AtomicUsize::new(0));
            let segment = failing(&a, &fails);
            let mut training = Stack::of(&vs, InBackward::new(adamw(&vs)).unwrap()).build().unwrap();
            // `b` is final before the segment of `a` is computed again, or takes no part.
            let loss = || {
                let y = segment(&Tensor::ones([2], CPU))?;
                Ok(Loss::of(if moved { y * &b } else { y }.sum(Kind::Float)))
            };
            let _ = training.step_with(loss).unwrap();
            let (before, state) = (copies(&[a.shallow_clone(), b.shallow_clone()]), training.position());
            fails.store(1, Ordering::Relaxed);
            let error = training.step_with(loss).unwrap_err();
            assert_eq!(matches!(error, Error::Poisoned { .. }), moved, "{error}");
            assert!(error.to_string().contains("in recompute"), "{error}");
            fails.store(0, Ordering::Relaxed);
            // The optimizer is back from the backward it was lent to.
            assert_eq!(training.optimizer().name(), "InBackward(AdamW)");
            assert_eq!(training.position(), state);
            if moved {
                assert!(training.step_with(loss).is_err());
            } else {
                assert!(same(&before, &[a.shallow_clone(), b.shallow_clone()]));
                assert!(training.step_with(loss).unwrap().stepped());
            }
        }
    }

    #[test]
    fn an_optimizer_that_fails_or_panics_in_backward_comes_back() {
        let _guard = serial();
        let cases: [(fn(&Ready) -> Result<Heard>, bool, &str); 3] = [
            (|_| Err(Error::config("mine", "refused")), false, "refused"),
            (
                |_| Err(Error::Poisoned { source: Box::new(Error::config("mine", "half-way")) }),
                true,
                "half-way",
            ),
            (|_| panic!("in a hook"), true, "in a hook"),
        ];
        for (then, poisons, text) in cases {
            let (vs, loss) = chain();
            let recorder = Recorder::new(&vs, GradientUse::WhenFinal, then);
            let mut training = Stack::of(&vs, recorder).build().unwrap();
            let error = training.step_with(|| Ok(Loss::of(loss()))).unwrap_err();
            assert_eq!(matches!(error, Error::Poisoned { .. }), poisons, "{error}");
            assert!(error.to_string().contains(text), "{error}");
            assert_eq!(training.optimizer().name(), "Recorder");
        }
    }

    #[test]
    fn a_backward_inside_a_hook_is_an_error_and_no_hang() {
        let _guard = serial();
        let (vs, loss) = chain();
        let nested: fn(&Ready) -> Result<Heard> = |ready| {
            if ready.index == 2 {
                NESTED.lock().unwrap().as_ref().unwrap().f_backward()?;
            }
            Ok(Heard::Noted)
        };
        let mut training =
            Stack::of(&vs, Recorder::new(&vs, GradientUse::WhenFinal, nested)).build().unwrap();
        // Another leaf of the same optimizer.
        let other = (vs.variables()["a"].square()).sum(Kind::Float);
        *NESTED.lock().unwrap() = Some(other);
        let error = training.step_with(|| Ok(Loss::of(loss()))).unwrap_err();
        *NESTED.lock().unwrap() = None;
        assert!(error.to_string().contains("inside itself"), "{error}");
    }

    static NESTED: Mutex<Option<Tensor>> = Mutex::new(None);

    #[test]
    fn a_closure_that_panics_costs_nothing() {
        let _guard = serial();
        let (vs, loss) = chain();
        let mut training = Stack::of(&vs, InBackward::new(adamw(&vs)).unwrap()).build().unwrap();
        let before = copies(&vs.trainable_variables());
        assert!(training.step_with(|| panic!("the user's own")).is_err());
        assert!(same(&before, &vs.trainable_variables()));
        assert!(training.step_with(|| Ok(Loss::of(loss()))).unwrap().stepped());
    }

    /// A backward of the user's own, outside of a step, moves nothing.
    #[test]
    fn a_backward_outside_of_a_step_moves_nothing() {
        let _guard = serial();
        let (vs, loss) = chain();
        let mut training = Stack::of(&vs, InBackward::new(adamw(&vs)).unwrap()).build().unwrap();
        let outcome = training.step_with(|| Ok(Loss::of(loss()))).unwrap();
        assert!(matches!(outcome, StepOutcome::Stepped { .. }));
        let before = copies(&vs.trainable_variables());
        loss().backward();
        assert!(same(&before, &vs.trainable_variables()));
    }
}
