//! Updates in backward: the driver's event "gradient final", and `InBackward` on it.

mod cost;
mod equivalence;
mod failure;
mod misuse;
mod order;
mod state;
#[path = "../support/mod.rs"]
mod support;
#[path = "../support/training.rs"]
mod training;

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
