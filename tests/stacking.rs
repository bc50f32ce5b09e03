//! Every legal pair and triple of strategies against the loop written by hand, and every
//! refusal, from one table.

mod support;

use memfit::checkpoint::ActivationCheckpoint;
use memfit::offload::CpuOffload;
use memfit::optim::{
    Accumulates, Adafactor, AdafactorConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, InBackward,
    Lion, LionConfig, Muon, MuonConfig, Optimizer, Parameters, Sgd, SgdConfig,
};
use memfit::step::Update;
use memfit::strategies::{
    AmpScaler, Budget, Cosine, GradAccumulator, GradClip, MasterWeights, MemoryTimeline, MicroBatcher,
    Rollback, autocast,
};
use memfit::tch::{Device, Kind, Tensor, nn, nn::ModuleT};
use memfit::{Error, Exactness, Loss, Named, Result, Stack, StackBuilder};
use support::{copies, difference, same, serial};

/// What can be stacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Every,
    Tokens,
    Fp32Sum,
    Bf16,
    Fp16,
    ClipNorm,
    ClipValue,
    Cosine,
    Checkpoint,
    OffloadActivations,
    OffloadOptimizer,
    OffloadParameters,
    Master,
    Rollback,
    Budget,
    Timeline,
    MicroBatches,
    InBackward,
}

use Part::{
    Bf16, Budget as Bound, Checkpoint, ClipNorm, ClipValue, Cosine as Schedule, Every, Fp16, Fp32Sum,
    InBackward as Early, Master, MicroBatches, OffloadActivations, OffloadOptimizer, OffloadParameters,
    Rollback as Undo, Timeline, Tokens,
};

const PARTS: [Part; 18] = [
    Every,
    Tokens,
    Fp32Sum,
    Bf16,
    Fp16,
    ClipNorm,
    ClipValue,
    Schedule,
    Checkpoint,
    OffloadActivations,
    OffloadOptimizer,
    OffloadParameters,
    Master,
    Undo,
    Bound,
    Timeline,
    MicroBatches,
    Early,
];

/// Pairs that `build()` refuses.
const REFUSED: [(Part, Part); 22] = [
    (Every, MicroBatches),
    (Tokens, MicroBatches),
    (Fp32Sum, MicroBatches),
    (MicroBatches, Early),
    (OffloadParameters, Master),
    (OffloadParameters, Fp32Sum),
    (Fp16, Master),
    (Fp32Sum, Fp16),
    (Every, Tokens),
    (Every, Fp32Sum),
    (Tokens, Fp32Sum),
    (Bf16, Fp16),
    (ClipNorm, ClipValue),
    (Fp32Sum, Master),
    (Fp32Sum, Undo),
    (Master, Undo),
    (Early, Fp32Sum),
    (Early, Fp16),
    (Early, ClipNorm),
    (Early, ClipValue),
    (Early, Master),
    (Early, Undo),
];

/// An optimizer of the battery. A new one is a line in [`OPTIMIZERS`].
#[derive(Clone, Copy)]
struct Kinds {
    name: &'static str,
    make: fn(&[Named]) -> Box<dyn Optimizer>,
    /// The largest sets of parts that it runs in: triples cost most of the time.
    largest: usize,
    /// How far of the way it may be off where only the order of sums is not kept.
    off: f64,
}

/// A sum's last bit moves a weight by as little, where the update is smooth.
const SMOOTH: f64 = 1e-3;

/// Where it is not, one last bit can be a step: the other sign of an element under Lion, which is
/// 1/√n of an update's way, with n = 5,000; the next 8-bit code or bf16 moment, which is a few per
/// cent, or 0.4 %, of one element's. Adafactor and Muon take every direction to the same size, so
/// what autocast rounds the other way in a weak one grows. One update too many or too few of the
/// seven is seven times as far off.
const STEPS: f64 = 2e-2;

impl Kinds {
    const fn new(name: &'static str, make: fn(&[Named]) -> Box<dyn Optimizer>) -> Self {
        Self { name, make, largest: 2, off: SMOOTH }
    }

    const fn in_triples(self) -> Self {
        Self { largest: 3, ..self }
    }

    const fn in_steps(self) -> Self {
        Self { off: STEPS, ..self }
    }
}

const ADAMW: Kinds = Kinds::new("AdamW", |named| Box::new(adamw(named, adamw_config()))).in_triples();

const OPTIMIZERS: [Kinds; 8] = [
    Kinds::new("Sgd", |named| Box::new(sgd(named, SgdConfig::default().momentum(0.9)))).in_triples(),
    ADAMW,
    Kinds::new("Sgd without momentum", |named| Box::new(sgd(named, SgdConfig::default()))),
    Kinds::new("AdamW, bf16 moments", |named| Box::new(adamw(named, adamw_config().moments(Kind::BFloat16))))
        .in_steps(),
    Kinds::new("Lion", |named| Box::new(Lion::new(named, LionConfig::default().lr(0.1 * LR)).unwrap()))
        .in_steps(),
    Kinds::new("AdamW8bit", |named| {
        let config = AdamW8bitConfig::default().lr(LR).epsilon(1e-2);
        Box::new(AdamW8bit::new(named, config).unwrap())
    })
    .in_steps(),
    Kinds::new("Adafactor", |named| {
        Box::new(Adafactor::new(named, AdafactorConfig::default().lr(LR)).unwrap())
    })
    .in_steps(),
    Kinds::new("Muon", |named| Box::new(muon(named))).in_steps(),
];

/// A segment with BatchNorm and dropout.
#[derive(Debug)]
struct Noisy {
    linear: nn::Linear,
    norm: nn::BatchNorm,
}

impl ModuleT for Noisy {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        xs.apply(&self.linear).apply_t(&self.norm, train).relu().dropout(0.25, train)
    }
}

/// A segment that uses one weight twice.
#[derive(Debug)]
struct Tied {
    weight: Tensor,
}

impl ModuleT for Tied {
    fn forward_t(&self, xs: &Tensor, _train: bool) -> Tensor {
        xs.matmul(&self.weight).tanh().matmul(&self.weight.tr()).gelu("none")
    }
}

/// Its square is the least number of elements whose state `AdamW8bit` quantises.
const WIDTH: i64 = 64;

struct Model {
    vs: nn::VarStore,
    noisy: Box<dyn ModuleT>,
    tied: Box<dyn ModuleT>,
    frozen: nn::Linear,
    head: nn::Linear,
}

impl Model {
    fn new(parts: &[Part]) -> Self {
        memfit::tch::manual_seed(11);
        let mut vs = nn::VarStore::new(Device::Cpu);
        let root = vs.root();
        let noisy = Noisy {
            linear: nn::linear(&root / "in", 6, WIDTH, Default::default()),
            norm: nn::batch_norm1d(&root / "norm", WIDTH, Default::default()),
        };
        let tied = Tied { weight: root.kaiming_uniform("tied", &[WIDTH, WIDTH]) };
        let frozen = nn::linear(&root / "frozen", WIDTH, WIDTH, Default::default());
        let head = nn::linear(&root / "head", WIDTH, 3, Default::default());
        let _ = frozen.ws.set_requires_grad(false);
        if parts.iter().any(|part| matches!(part, Master | Fp32Sum)) {
            vs.bfloat16();
        }
        let checkpointed = parts.contains(&Checkpoint);
        let noisy: Box<dyn ModuleT> = if parts.contains(&OffloadParameters) {
            let weights =
                vec![noisy.linear.ws.shallow_clone(), noisy.norm.ws.as_ref().unwrap().shallow_clone()];
            let away = CpuOffload::parameters(noisy, &weights).with_train();
            checkpoint_if(checkpointed, away.disk(std::env::temp_dir()).unwrap())
        } else {
            checkpoint_if(checkpointed, noisy)
        };
        Self { vs, noisy, tied: checkpoint_if(checkpointed, tied), frozen, head }
    }

    /// The model of the loop by hand: its segments are not wrapped.
    fn plain(parts: &[Part]) -> Self {
        let wraps = |part: &&Part| !matches!(part, Checkpoint | OffloadParameters);
        Self::new(&parts.iter().filter(wraps).copied().collect::<Vec<_>>())
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> Tensor {
        let x = x.to_kind(self.head.ws.kind());
        let hidden = self.tied.forward_t(&self.noisy.forward_t(&x, true), true);
        let logits = hidden.apply(&self.frozen).apply(&self.head);
        logits.to_kind(Kind::Float).cross_entropy_for_logits(y)
    }
}

fn checkpoint_if<M: ModuleT + 'static>(checkpointed: bool, module: M) -> Box<dyn ModuleT> {
    if checkpointed { Box::new(ActivationCheckpoint::with_train(module).checked()) } else { Box::new(module) }
}

/// Unequal batches, unless gradients are added up in a momentum; the last window is short.
fn batches(parts: &[Part], kind: Kinds) -> Vec<(Tensor, Tensor)> {
    memfit::tch::manual_seed(5);
    let model = Model::plain(&[]);
    let joins = (kind.make)(&model.vs.named()).accumulates() == Accumulates::InState;
    let equal = joins && parts.contains(&Early) && parts.contains(&Every);
    if equal { [4; 7] } else { [4, 4, 2, 3, 5, 4, 6] }
        .map(|rows| {
            let x = Tensor::randn([rows, 6], (Kind::Float, Device::Cpu));
            (x, Tensor::randint(3, [rows], (Kind::Int64, Device::Cpu)))
        })
        .into()
}

/// The most rows of a micro-batch that `MicroBatches` makes.
const MOST_ROWS: i64 = 3;

/// What the loop by hand runs: batches, or the parts that they are split into.
fn micro_batches(parts: &[Part], kind: Kinds) -> Vec<(Tensor, Tensor)> {
    let batches = batches(parts, kind);
    if !parts.contains(&MicroBatches) {
        return batches;
    }
    let split = |(x, y): &(Tensor, Tensor)| {
        let each = rows_of_each(x.size()[0]);
        x.split(each, 0).into_iter().zip(y.split(each, 0)).collect::<Vec<_>>()
    };
    batches.iter().flat_map(split).collect()
}

/// As equal as whole rows allow.
fn rows_of_each(rows: i64) -> i64 {
    let micros = (rows + MOST_ROWS - 1) / MOST_ROWS;
    (rows + micros - 1) / micros
}

const LR: f64 = 0.05;
const SCALE: f64 = 1024.0;
const MAX_NORM: f64 = 0.4;
const MAX_VALUE: f64 = 0.03;

fn sgd(named: &[Named], config: SgdConfig) -> Sgd {
    Sgd::new(named, config.lr(LR).weight_decay(0.01)).unwrap()
}

/// At an epsilon with which a gradient that is only rounding noise does not move a weight.
fn adamw_config() -> AdamWConfig {
    AdamWConfig::default().lr(LR).epsilon(1e-2)
}

fn adamw(named: &[Named], config: AdamWConfig) -> AdamW {
    AdamW::new(named, config).unwrap()
}

/// The head and all that is no matrix are the others.
fn muon(named: &[Named]) -> Muon {
    let matrix = |named: &Named| named.tensor.dim() > 1 && !named.name.starts_with("head");
    let (matrices, others): (Vec<Named>, Vec<Named>) = named.named().into_iter().partition(matrix);
    let config = MuonConfig::default().lr(0.4 * LR).others(adamw_config());
    Muon::new(&matrices, &others, config).unwrap()
}

/// How many micro-batches each window has.
fn windows(parts: &[Part]) -> Vec<usize> {
    if parts.contains(&Tokens) {
        // 9 tokens: 4+4+2, 3+5+4, 6.
        vec![3, 3, 1]
    } else if parts.contains(&Every) || parts.contains(&Fp32Sum) {
        vec![3, 3, 1]
    } else if parts.contains(&MicroBatches) {
        // 4, 4, 2, 3, 5, 4 and 6 rows in micro-batches of at most 3.
        vec![2, 2, 1, 1, 2, 2, 2]
    } else {
        vec![1; 7]
    }
}

/// The loop written by hand.
fn oracle(parts: &[Part], kind: Kinds) -> (Vec<Tensor>, Vec<Tensor>) {
    let model = Model::plain(parts);
    let parameters = model.vs.trainable_variables();
    let trained = |p: &Tensor| p.requires_grad();
    let has = |part| parts.contains(&part);
    let masters: Vec<Named> = model
        .vs
        .named()
        .iter()
        .map(|p| {
            let copy = p.tensor.detach().to_kind(Kind::Float);
            let master = if has(Master) {
                copy.set_requires_grad(trained(&p.tensor))
            } else {
                p.tensor.shallow_clone()
            };
            Named::new(p.name.clone(), &master)
        })
        .collect();
    let mut optimizer = (kind.make)(&masters);
    let rates: Vec<f64> = optimizer.groups().iter().map(|group| group.lr).collect();
    let schedule = Cosine::new(8).warm_up(2);
    let scale = if has(Fp16) { SCALE } else { 1.0 };
    let data = micro_batches(parts, kind);
    let mut data = data.iter();
    memfit::tch::manual_seed(3);
    let mut losses = Vec::new();
    for (step, micros) in windows(parts).into_iter().enumerate() {
        let mut sums: Vec<Option<Tensor>> = parameters.iter().map(|_| None).collect();
        let (mut first, mut total, mut summed) = (0.0, 0.0, None::<Tensor>);
        for micro in data.by_ref().take(micros).enumerate() {
            let (index, (x, y)) = micro;
            let n = x.size()[0] as f64;
            if index == 0 {
                first = n;
            }
            total += n;
            let forward = || Ok(model.loss(x, y));
            let loss = match () {
                () if has(Bf16) => autocast(Device::Cpu, Kind::BFloat16, forward),
                () if has(Fp16) => autocast(Device::Cpu, Kind::Half, forward),
                () => forward(),
            }
            .unwrap();
            let part = loss.detach() * n;
            summed = Some(summed.map_or(part.shallow_clone(), |sum| sum + part));
            (loss * (n / first) * scale).backward();
            if has(Fp32Sum) || has(Master) {
                for (sum, p) in sums.iter_mut().zip(&parameters).filter(|(_, p)| p.grad().defined()) {
                    let grad = p.grad().to_kind(Kind::Float);
                    *sum = Some(sum.as_ref().map_or(grad.shallow_clone(), |sum| sum + grad));
                    p.shallow_clone().zero_grad();
                }
            }
        }
        losses.push(summed.unwrap() / total);
        let grads: Vec<Option<Tensor>> = masters
            .iter()
            .zip(parameters.iter().zip(sums))
            .map(|(master, (p, sum))| {
                let grad = sum.or_else(|| p.grad().defined().then(|| p.grad()))?;
                Some(grad.to_kind(master.tensor.kind()) / (total / first * scale))
            })
            .collect();
        let squares = grads
            .iter()
            .flatten()
            .map(|g| g.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]));
        let norm = squares.sum::<f64>().sqrt();
        for (master, grad) in masters.iter().zip(grads) {
            let Some(mut grad) = grad else { continue };
            if has(ClipNorm) && norm > MAX_NORM {
                grad *= MAX_NORM / norm;
            }
            if has(ClipValue) {
                grad = grad.clamp(-MAX_VALUE, MAX_VALUE);
            }
            support::set_grad(&master.tensor, &grad);
        }
        if has(Schedule) {
            for (group, rate) in optimizer.groups_mut().iter_mut().zip(&rates) {
                group.lr = rate * schedule.factor(step as u64);
            }
        }
        optimizer.step(&Update::plain()).unwrap();
        optimizer.zero_grad();
        for (p, master) in parameters.iter().zip(&masters) {
            p.shallow_clone().zero_grad();
            if has(Master) {
                memfit::tch::no_grad(|| p.shallow_clone().copy_(&master.tensor));
            }
        }
    }
    (results(model), losses)
}

/// Weights and running statistics, by name; offloaded ones are back when their module is gone.
fn results(model: Model) -> Vec<Tensor> {
    let vs = model.vs;
    drop((model.noisy, model.tied));
    let mut named: Vec<_> = vs.variables().into_iter().collect();
    named.sort_by(|a, b| a.0.cmp(&b.0));
    copies(&named.into_iter().map(|(_, tensor)| tensor).collect::<Vec<_>>())
}

fn start(parts: &[Part], model: &Model, kind: Kinds) -> Result<StackBuilder> {
    let optimizer = (kind.make)(&model.vs.named());
    let (state, weights) = (parts.contains(&OffloadOptimizer), parts.contains(&OffloadParameters));
    let optimizer: Box<dyn Optimizer> = match (state, weights) {
        (false, false) => optimizer,
        (false, true) => Box::new(CpuOffload::optimizer(optimizer).resident()?),
        (true, _) => Box::new(CpuOffload::optimizer(optimizer).disk(std::env::temp_dir())?),
    };
    Ok(if parts.contains(&Early) {
        Stack::of(&model.vs, InBackward::new(optimizer)?)
    } else {
        Stack::of(&model.vs, optimizer)
    })
}

/// The same by a stack.
fn stacked(parts: &[Part], kind: Kinds) -> Result<(Vec<Tensor>, Vec<Tensor>, Exactness)> {
    let model = Model::new(parts);
    let folder = std::env::temp_dir();
    let mut builder = start(parts, &model, kind)?;
    // Backwards, to show that the order of `.with` never matters.
    for part in parts.iter().rev() {
        builder = match part {
            Every => builder.with(GradAccumulator::every(3)),
            Tokens => builder.with(GradAccumulator::tokens(9)),
            Fp32Sum => builder.with(GradAccumulator::every(3).fp32()),
            Bf16 => builder.with(AmpScaler::bf16()),
            Fp16 => builder.with(AmpScaler::fp16_with(|config| config.init_scale = SCALE)?),
            ClipNorm => builder.with(GradClip::norm(MAX_NORM)),
            ClipValue => builder.with(GradClip::value(MAX_VALUE)),
            Schedule => builder.with(Cosine::new(8).warm_up(2)),
            OffloadActivations => builder.with(CpuOffload::activations().disk(&folder).min_bytes(0)),
            Master => builder.with(MasterWeights::fp32()),
            Undo => builder.with(Rollback::micro_batch()),
            Bound => builder.with(Budget::parse("1GiB")?),
            Timeline => builder.with(MemoryTimeline::new().capacity(1 << 10)),
            MicroBatches => builder.with(MicroBatcher::new().start(MOST_ROWS).patience(0)),
            Checkpoint | OffloadOptimizer | OffloadParameters | Early => builder,
        };
    }
    let mut training = builder.build()?;
    let data = batches(parts, kind);
    memfit::tch::manual_seed(3);
    let loss = |(x, y): &(Tensor, Tensor)| Ok(Loss::mean(model.loss(x, y), x.size()[0]));
    let mut outcomes = Vec::new();
    if parts.contains(&MicroBatches) {
        for batch in &data {
            outcomes.push(training.step_batch(batch, loss)?);
        }
    } else {
        for micro in training.windows(data) {
            outcomes.push(training.step(micro?, loss)?);
        }
    }
    let losses = outcomes.into_iter().filter_map(|outcome| match outcome {
        memfit::StepOutcome::Stepped { loss, .. } => Some(loss),
        _ => None,
    });
    let losses = losses.collect();
    let exactness = training.exactness();
    drop(training);
    Ok((results(model), losses, exactness))
}

fn refused(parts: &[Part], kind: Kinds) -> bool {
    let has = |part| parts.contains(&part);
    let windows = match (kind.make)(&Model::plain(&[]).vs.named()).accumulates() {
        Accumulates::InGradients => false,
        Accumulates::InState => has(Tokens),
        Accumulates::Nowhere => has(Every) || has(Tokens),
    };
    (has(Early) && windows) || REFUSED.iter().any(|(a, b)| has(*a) && has(*b))
}

/// What is wrong with a set of parts, if anything.
fn fault(parts: &[Part], kind: Kinds) -> Option<String> {
    let got = stacked(parts, kind);
    if refused(parts, kind) {
        return match got {
            Err(Error::Incompatible { left, right, remedy, .. })
                if !left.is_empty() && !right.is_empty() && !remedy.is_empty() =>
            {
                None
            }
            Err(error) => Some(format!("refused with another error: {error}")),
            Ok(_) => Some("not refused".to_owned()),
        };
    }
    let (tensors, losses, exactness) = match got {
        Ok(got) => got,
        Err(error) => return Some(error.to_string()),
    };
    let (wanted, wanted_losses) = oracle(parts, kind);
    if exactness == Exactness::Bitwise {
        let equal = same(&tensors, &wanted) && same(&losses, &wanted_losses);
        return (!equal).then(|| "not the same bits as the loop by hand".to_owned());
    }
    // Against how far training moved the weights: a stack that never steps would be at 1. bf16
    // weights may round the other way in some elements. BatchNorm takes the mean of `in.bias` away
    // again, so its gradient is rounding noise; an update that does not shrink with the gradient
    // moves it, and the running mean with it, at random.
    let compared = |name: &str| !name.contains("running") && name != "in.bias";
    let half = parts.iter().any(|part| matches!(part, Fp32Sum | Master));
    let model = Model::plain(parts);
    let mut names: Vec<String> = model.vs.variables().into_keys().collect();
    names.sort();
    let start = results(model);
    let distance = |a: &[Tensor], b: &[Tensor]| -> f64 {
        let weights = a.iter().zip(b).zip(&names).filter(|(_, name)| compared(name));
        let squares = weights.map(|((a, b), _)| {
            (a.to_kind(Kind::Double) - b.to_kind(Kind::Double)).square().sum(Kind::Double).double_value(&[])
        });
        squares.sum::<f64>().sqrt()
    };
    let off = distance(&tensors, &wanted) / distance(&wanted, &start);
    if off > if half { 0.2 } else { kind.off } {
        return Some(format!("is {off:.1e} of the way off the loop by hand"));
    }
    // What autocast rounds the other way after the last bit of a product differs by processor.
    let autocast = parts.iter().any(|part| matches!(part, Bf16 | Fp16));
    let most = match () {
        () if half || kind.off == STEPS => 2e-2,
        () if autocast => 1e-3,
        () => 1e-5,
    };
    let apart = losses.iter().zip(&wanted_losses).map(|(a, b)| difference(a, b)).fold(0.0, f64::max);
    (apart > most).then(|| format!("losses differ by {apart:.1e}"))
}

fn check(sets: impl Iterator<Item = Vec<Part>>) {
    let mut faults = Vec::new();
    let mut runs = 0;
    for parts in sets {
        for kind in OPTIMIZERS.into_iter().filter(|kind| parts.len() <= kind.largest) {
            runs += 1;
            faults.extend(fault(&parts, kind).map(|text| format!("{parts:?} {}: {text}", kind.name)));
        }
    }
    assert!(faults.is_empty(), "{} of {runs}:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn each_strategy_alone_is_the_loop_by_hand() {
    let _guard = serial();
    check(std::iter::once(vec![]).chain(PARTS.map(|part| vec![part])));
}

#[test]
fn every_pair_is_the_loop_by_hand_or_refused() {
    let _guard = serial();
    check((0..PARTS.len()).flat_map(|i| PARTS[i + 1..].iter().map(move |b| vec![PARTS[i], *b])));
}

#[test]
fn every_triple_is_the_loop_by_hand_or_refused() {
    let _guard = serial();
    let pairs = (0..PARTS.len()).flat_map(|i| (i + 1..PARTS.len()).map(move |j| (i, j)));
    check(pairs.flat_map(|(i, j)| PARTS[j + 1..].iter().map(move |c| vec![PARTS[i], PARTS[j], *c])));
}

#[test]
fn the_oracle_itself_trains() {
    let _guard = serial();
    let (before, (after, losses)) = (results(Model::plain(&[])), oracle(&[], ADAMW));
    assert_eq!(losses.len(), 7);
    let moved = before.iter().zip(&after).filter(|(a, b)| difference(a, b) > 0.0).count();
    // All but the frozen weight: parameters, and BatchNorm's statistics.
    assert_eq!(moved, before.len() - 1);
}
