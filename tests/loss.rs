//! The fused linear layer and cross-entropy.

mod support;

use memfit::loss::{
    Evaluation, Inputs, LinearCrossEntropy, LinearCrossEntropyConfig as Config, Reduction, TokenLoss,
    evaluate_cross_entropy, linear_cross_entropy,
};
use memfit::memory::PeakScope;
use memfit::strategies::{AmpScaler, GradAccumulator, autocast};
use memfit::tch::{Device, Kind, Tensor, nn, no_grad};
use memfit::{CpuOffload, Error, Loss, Stack, checkpoint::Shared};
use support::{difference, live, serial, sgd};

const IGNORED: i64 = -100;

/// One problem, with leaves of its own.
struct Problem {
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    token_weights: Tensor,
}

impl Problem {
    fn new(tokens: i64, width: i64, classes: i64, kind: Kind) -> Self {
        let double = (Kind::Double, Device::Cpu);
        let leaf = |t: Tensor| t.to_kind(kind).set_requires_grad(true);
        let targets = Tensor::randint(classes, [tokens], (Kind::Int64, Device::Cpu));
        if tokens > 3 {
            let _ = targets.narrow(0, 2, 1).fill_(IGNORED);
        }
        Self {
            hidden: leaf(Tensor::randn([tokens, width], double)),
            weight: leaf(Tensor::randn([classes, width], double)),
            bias: leaf(Tensor::randn([classes], double)),
            targets,
            token_weights: Tensor::rand([tokens], double).to_kind(kind),
        }
    }

    fn inputs(&self) -> Inputs<'_> {
        Inputs::new(&self.hidden, &self.weight, &self.targets)
    }

    /// The same problem with the same values in fp64.
    fn exact(&self) -> Self {
        let wide = |t: &Tensor| t.detach().to_kind(Kind::Double);
        let leaf = |t: &Tensor| wide(t).copy().set_requires_grad(true);
        Self {
            hidden: leaf(&self.hidden),
            weight: leaf(&self.weight),
            bias: leaf(&self.bias),
            targets: self.targets.shallow_clone(),
            token_weights: wide(&self.token_weights),
        }
    }
}

/// What a case switches on.
#[derive(Clone, Copy, Debug, Default)]
struct With {
    bias: bool,
    token_weights: bool,
    smoothing: f64,
    z: f64,
    sum: bool,
    seed: Option<f64>,
}

impl With {
    fn config(&self) -> Config {
        let reduction = if self.sum { Reduction::Sum } else { Reduction::Mean };
        Config::default().label_smoothing(self.smoothing).z_loss(self.z).reduction(reduction)
    }

    fn fused(&self, p: &Problem, chunk_bytes: u64) -> TokenLoss {
        let loss = LinearCrossEntropy::new(self.config().chunk_bytes(chunk_bytes)).unwrap();
        let mut inputs = p.inputs();
        if self.bias {
            inputs = inputs.bias(&p.bias);
        }
        if self.token_weights {
            inputs = inputs.token_weights(&p.token_weights);
        }
        loss.loss(&inputs).unwrap()
    }

    /// The plain form, in tch.
    fn plain(&self, p: &Problem) -> Tensor {
        let logits = p.hidden.linear(&p.weight, self.bias.then_some(&p.bias));
        let log_p = logits.log_softmax(-1, p.hidden.kind());
        let counts = p.targets.ne(IGNORED);
        let own = log_p.gather(-1, &p.targets.clamp_min(0).unsqueeze(-1), false).squeeze_dim(-1);
        let z = logits.logsumexp([-1], false).square();
        let mean = log_p.mean_dim([-1].as_slice(), false, None::<Kind>);
        let each = own * -(1.0 - self.smoothing) - mean * self.smoothing + z * self.z;
        let weights = counts.to_kind(p.hidden.kind());
        let weights = if self.token_weights { weights * &p.token_weights } else { weights };
        let sum = (each * &weights).sum(p.hidden.kind());
        if self.sum { sum } else { sum / weights.sum(p.hidden.kind()) }
    }
}

fn gradients(p: &Problem, loss: &Tensor, with: With) -> Vec<Tensor> {
    let mut leaves = vec![&p.hidden, &p.weight];
    if with.bias {
        leaves.push(&p.bias);
    }
    let loss = with.seed.map_or(loss.shallow_clone(), |seed| loss * seed);
    Tensor::run_backward(&[loss], &leaves, false, false)
}

fn cases() -> Vec<With> {
    let none = With::default();
    vec![
        none,
        With { bias: true, ..none },
        With { sum: true, bias: true, seed: Some(0.37), ..none },
        With { token_weights: true, bias: true, ..none },
        With { smoothing: 0.1, ..none },
        With { smoothing: 1.0, sum: true, ..none },
        With { z: 1e-2, bias: true, ..none },
        With { bias: true, token_weights: true, smoothing: 0.2, z: 3e-2, seed: Some(-2.5), sum: false },
    ]
}

#[test]
fn loss_and_gradients_are_the_plain_forms() {
    let _guard = serial();
    for (kind, tolerance) in [(Kind::Double, 1e-12), (Kind::Float, 1e-5)] {
        for (tokens, classes) in [(7, 5), (65, 50), (33, 1040), (1, 1), (16, 16)] {
            for with in cases() {
                let p = Problem::new(tokens, 12, classes, kind);
                let exact = p.exact();
                let truth = with.plain(&exact);
                let wanted = gradients(&exact, &truth, with);
                for chunk in [1, classes as u64 * 8 * 3, 1 << 30] {
                    let fused = with.fused(&p, chunk);
                    assert_eq!((fused.loss.kind(), fused.loss.size()), (kind, vec![]));
                    let size = truth.abs().double_value(&[]).max(1.0);
                    let error = difference(&fused.loss, &truth) / size;
                    assert!(error < tolerance, "{kind:?} {tokens} {with:?} {chunk}: loss {error}");
                    let found = gradients(&p, &fused.loss, with);
                    for (found, wanted) in found.iter().zip(&wanted) {
                        assert_eq!(found.kind(), kind);
                        let size = wanted.abs().max().double_value(&[]).max(1e-2);
                        let error = difference(found, wanted) / size;
                        assert!(error < tolerance, "{kind:?} {tokens} {classes} {with:?} {chunk}: {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn the_derivative_is_the_difference_quotient() {
    let _guard = serial();
    let with = With { bias: true, token_weights: true, smoothing: 0.1, z: 1e-2, ..Default::default() };
    let p = Problem::new(6, 4, 9, Kind::Double);
    let found = gradients(&p, &with.fused(&p, 150).loss, with);
    for (leaf, found) in [&p.hidden, &p.weight, &p.bias].into_iter().zip(&found) {
        let flat = leaf.detach().view(-1);
        for index in 0..flat.size()[0] {
            let at = |step: f64| {
                let value = flat.double_value(&[index]);
                let _ = flat.get(index).fill_(value + step);
                let loss = no_grad(|| with.fused(&p, 150).loss).double_value(&[]);
                let _ = flat.get(index).fill_(value);
                loss
            };
            let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
            assert!((slope - found.view(-1).double_value(&[index])).abs() < 1e-8);
        }
    }
}

#[test]
fn the_error_does_not_grow_with_the_number_of_chunks() {
    let _guard = serial();
    for (kind, bound) in [(Kind::Float, 2e-6), (Kind::BFloat16, 2e-2)] {
        let p = Problem::new(1024, 16, 64, kind);
        let exact = p.exact();
        let with = With { sum: true, bias: true, ..Default::default() };
        let wanted = gradients(&exact, &with.plain(&exact), with);
        let row = 64 * kind.elt_size_in_bytes() as u64;
        let errors = |chunk: u64| -> Vec<f64> {
            let found = gradients(&p, &with.fused(&p, chunk).loss, with);
            found
                .iter()
                .zip(&wanted)
                .map(|(f, w)| difference(f, w) / w.abs().max().double_value(&[]))
                .collect()
        };
        let (one, many) = (errors(1 << 30), errors(16 * row));
        for (one, many) in one.iter().zip(&many) {
            assert!(*one < bound && *many < bound, "{kind:?} {one} {many}");
            assert!(*many < 2.0 * one.max(bound / 20.0), "{kind:?} {one} {many}");
        }
    }
}

#[test]
fn two_runs_and_any_number_of_threads_give_the_same_bits() {
    let _guard = serial();
    let p = Problem::new(300, 8, 500, Kind::Float);
    let with = With { bias: true, smoothing: 0.1, ..Default::default() };
    let run = |threads: i32| {
        memfit::tch::set_num_threads(threads);
        let loss = with.fused(&p, 20_000).loss;
        let mut all = gradients(&p, &loss, with);
        all.push(loss.detach());
        all
    };
    let (one, again, two) = (run(1), run(1), run(2));
    memfit::tch::set_num_threads(1);
    assert!(support::same(&one, &again));
    assert!(support::same(&one[3..], &two[3..]));
}

/// The bytes of docs/memory-model.md.
#[test]
fn the_peak_is_the_documented_one_to_the_byte() {
    let _guard = serial();
    let (n, d, v) = (257u64, 24u64, 1000u64);
    for bias in [false, true] {
        for chunk in [1u64, 100_000, 1 << 30] {
            let p = Problem::new(n as i64, d as i64, v as i64, Kind::Float);
            let with = With { bias, ..Default::default() };
            let loss = LinearCrossEntropy::new(Config::default().chunk_bytes(chunk)).unwrap();
            let logits = loss.bytes_of_chunk(n, v, Kind::Float, Device::Cpu);
            assert!(logits <= chunk.max(4 * v));
            let before = live();
            let scope = PeakScope::new(Device::Cpu).unwrap();
            let fused = with.fused(&p, chunk);
            let gradients = 4 * (n * d + v * d + if bias { v } else { 0 });
            assert_eq!(scope.peak() - before, gradients + logits, "{bias} {chunk}");
            assert_eq!(live() - before, gradients + 4);
            fused.loss.backward();
            assert_eq!(scope.peak() - before, gradients + logits.max(8), "backward {bias} {chunk}");
            drop(fused);
            assert_eq!(live() - before, gradients);

            let before = live();
            let scope = PeakScope::new(Device::Cpu).unwrap();
            let kept = no_grad(|| with.fused(&p, chunk));
            assert_eq!(scope.peak() - before, logits);
            assert_eq!(live() - before, 4);
            assert!(!kept.loss.requires_grad());
        }
    }
}

/// The bytes of docs/memory-model.md, with casts.
#[test]
fn the_peak_under_autocast_and_of_half_weights_is_the_documented_range() {
    let _guard = serial();
    let (n, d, v) = (128u64, 32u64, 1000u64);
    let (chunk, rows, piece) = (2 * 32 * v, 32, 2 * d * v);
    let p = Problem::new(n as i64, d as i64, v as i64, Kind::Float);
    let before = live();
    let scope = PeakScope::new(Device::Cpu).unwrap();
    let fused = autocast(Device::Cpu, Kind::BFloat16, || Ok(With::default().fused(&p, chunk))).unwrap();
    let casts = 2 * v * d + 2 * (2 * rows * d) + piece;
    let documented = 4 * (n * d + v * d) + chunk + casts;
    // oneDNN may repack an operand of a product: a chunk, or the weight.
    let packed = chunk.max(2 * v * d) + (16 << 10);
    let peak = scope.peak() - before;
    assert!((documented..=documented + packed).contains(&peak), "{peak} {documented} {packed}");
    drop(fused);

    let p = Problem::new(n as i64, d as i64, v as i64, Kind::BFloat16);
    let before = live();
    let scope = PeakScope::new(Device::Cpu).unwrap();
    let fused = With::default().fused(&p, chunk);
    let (documented, peak) = (2 * n * d + 4 * v * d + chunk + piece, scope.peak() - before);
    assert!((documented..=documented + packed).contains(&peak), "{peak} {documented} {packed}");
    drop(scope);
    let scope = PeakScope::new(Device::Cpu).unwrap();
    fused.loss.backward();
    assert_eq!(scope.peak() - before, 2 * n * d + 4 * v * d + 2 * v * d + 8);
}

#[test]
fn only_what_needs_a_gradient_is_made_and_dropping_the_graph_frees_it() {
    let _guard = serial();
    let (n, d, v) = (40u64, 8u64, 30u64);
    for (hidden, weight) in [(true, false), (false, true), (false, false)] {
        let p = Problem::new(n as i64, d as i64, v as i64, Kind::Float);
        let _ = p.hidden.set_requires_grad(hidden);
        let _ = p.weight.set_requires_grad(weight);
        let before = live();
        let fused = With::default().fused(&p, 1 << 20);
        let wanted = 4 * (u64::from(hidden) * n * d + u64::from(weight) * v * d);
        assert_eq!(live() - before, wanted + 4);
        assert_eq!(fused.loss.requires_grad(), hidden || weight);
        drop(fused);
        assert_eq!(live(), before);
    }
}

#[test]
fn where_all_labels_are_ignored_loss_and_gradients_are_zero() {
    let _guard = serial();
    for tokens in [0, 5] {
        let p = Problem::new(tokens, 4, 7, Kind::Float);
        let _ = p.targets.shallow_clone().fill_(IGNORED);
        for sum in [false, true] {
            let with = With { sum, bias: true, smoothing: 0.1, z: 0.1, ..Default::default() };
            let fused = with.fused(&p, 1 << 20);
            assert_eq!((fused.weight, fused.tokens, fused.loss.double_value(&[])), (0.0, 0, 0.0));
            for grad in gradients(&p, &fused.loss, with) {
                assert_eq!(grad.count_nonzero(None::<i64>).int64_value(&[]), 0);
            }
        }
        let seen = evaluate_cross_entropy(&p.hidden, &p.weight, &p.targets).unwrap();
        assert_eq!(seen, Evaluation::default());
    }
}

#[test]
fn tokens_and_weights_are_what_a_window_needs() {
    let _guard = serial();
    let p = Problem::new(6, 4, 7, Kind::Float);
    let fused = With::default().fused(&p, 1 << 20);
    assert_eq!((fused.weight, fused.tokens), (5.0, 5));
    assert_eq!(fused.into_loss().weight(), Some(5.0));
    let weights = Tensor::from_slice(&[1f32, 0.5, 9.0, 0.0, 2.0, 0.25]);
    let loss = LinearCrossEntropy::new(Config::default()).unwrap();
    let fused = loss.loss(&p.inputs().token_weights(&weights)).unwrap();
    assert_eq!((fused.weight, fused.tokens), (3.75, 4));
}

#[test]
fn any_leading_shape_and_any_strides_will_do() {
    let _guard = serial();
    let p = Problem::new(24, 6, 11, Kind::Double);
    let flat = With::default().fused(&p, 1 << 20).loss;
    let wanted = gradients(&p, &flat, With::default());
    let shaped = |t: &Tensor| t.detach().view([2, 3, 4, -1]).squeeze_dim(-1);
    let hidden = shaped(&p.hidden).transpose(0, 1).contiguous().transpose(0, 1).set_requires_grad(true);
    let weight = p.weight.detach().tr().contiguous().tr().set_requires_grad(true);
    let targets = p.targets.view([2, 3, 4]);
    let loss = linear_cross_entropy(&hidden, &weight, &targets).unwrap().loss;
    assert!(difference(&loss, &flat) < 1e-14);
    loss.backward();
    assert_eq!(weight.grad().stride(), weight.stride());
    assert!(difference(&hidden.grad().reshape([24, 6]), &wanted[0]) < 1e-14);
    assert!(difference(&weight.grad(), &wanted[1]) < 1e-14);
    // One token without a dimension of its own.
    let one = linear_cross_entropy(&p.hidden.get(0), &p.weight, &p.targets.get(0)).unwrap();
    assert_eq!(one.tokens, 1);
}

#[test]
fn a_second_backward_works_where_the_graph_is_kept_and_a_second_derivative_is_refused() {
    let _guard = serial();
    let p = Problem::new(9, 4, 7, Kind::Float);
    let loss = With::default().fused(&p, 60).loss * 0.5;
    let leaves = [&p.hidden, &p.weight];
    let first = support::copies(&Tensor::run_backward(&[&loss], &leaves, true, false));
    let second = support::copies(&Tensor::run_backward(&[&loss], &leaves, true, false));
    let error = Tensor::f_run_backward(&[&loss], &leaves, true, true).unwrap_err();
    assert!(matches!(Error::from(error), Error::Unsupported { what, .. } if what == "a second derivative"));
    let last = Tensor::run_backward(&[&loss], &leaves, false, false);
    assert!(support::same(&first, &second) && support::same(&first, &last));
    let again = Tensor::f_run_backward(&[&loss], &leaves, false, false).unwrap_err();
    assert!(again.to_string().contains("second time"), "{again}");
}

#[test]
fn extreme_logits_give_the_plain_forms_loss() {
    let _guard = serial();
    let weight = Tensor::eye(3, (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let targets = Tensor::from_slice(&[0i64]);
    for row in [[1e4f32, -1e4, 0.0], [-1e30, -1e30, -1e30], [88.0, 87.0, 0.0], [-104.0, 0.0, -0.001]] {
        let hidden = Tensor::from_slice(&row).view([1, 3]).set_requires_grad(true);
        let fused = linear_cross_entropy(&hidden, &weight, &targets).unwrap().loss;
        let plain = hidden.linear(&weight, None::<&Tensor>).cross_entropy_for_logits(&targets);
        let wanted = plain.double_value(&[]);
        assert!((fused.double_value(&[]) - wanted).abs() <= 1e-6 * wanted.abs().max(1.0), "{row:?}");
        let found = Tensor::run_backward(&[fused], &[&hidden], false, false);
        let wanted = Tensor::run_backward(&[plain], &[&hidden], false, false);
        assert!(difference(&found[0], &wanted[0]) < 1e-6);
    }
    for bad in [f32::NAN, f32::INFINITY] {
        let hidden = Tensor::from_slice(&[bad, 0.0, 0.0]).view([1, 3]);
        assert!(linear_cross_entropy(&hidden, &weight, &targets).unwrap().loss.double_value(&[]).is_nan());
    }
}

#[test]
fn a_wrong_target_is_named_before_anything_is_computed() {
    let _guard = serial();
    let p = Problem::new(6, 4, 7, Kind::Float);
    for (bad, at) in [(7, 3), (-1, 0), (i64::MIN, 5)] {
        let targets = p.targets.copy();
        let _ = targets.get(at).fill_(bad);
        let before = memfit::memory::stats(Device::Cpu).unwrap().allocations;
        let error = linear_cross_entropy(&p.hidden, &p.weight, &targets).unwrap_err();
        assert_eq!(memfit::memory::stats(Device::Cpu).unwrap().allocations, before);
        let text = error.to_string();
        assert!(matches!(error, Error::Config { setting: "targets", .. }), "{text}");
        assert!(text.contains(&format!("target {bad} at token {at}")), "{text}");
    }
    for bad in [-0.5f32, f32::NAN, f32::INFINITY] {
        let weights = Tensor::from_slice(&[1.0, bad, 1.0, 1.0, 1.0, 1.0]);
        let loss = LinearCrossEntropy::new(Config::default()).unwrap();
        let error = loss.loss(&p.inputs().token_weights(&weights)).unwrap_err();
        assert!(matches!(error, Error::Config { setting: "token_weights", .. }), "{error}");
    }
}

#[test]
fn what_does_not_fit_is_a_typed_error() {
    let _guard = serial();
    let p = Problem::new(6, 4, 7, Kind::Float);
    let setting = |inputs: &Inputs<'_>| match LinearCrossEntropy::new(Config::default()).unwrap().loss(inputs)
    {
        Err(Error::Config { setting, .. }) => setting,
        other => panic!("{other:?}"),
    };
    let (cube, narrow) = (p.weight.view([7, 4, 1]), p.weight.narrow(1, 0, 3));
    assert_eq!(setting(&Inputs::new(&p.hidden, &cube, &p.targets)), "weight");
    assert_eq!(setting(&Inputs::new(&p.hidden, &narrow, &p.targets)), "hidden");
    assert_eq!(setting(&Inputs::new(&p.hidden, &p.weight, &p.targets.narrow(0, 0, 5))), "targets");
    assert_eq!(setting(&Inputs::new(&p.hidden, &p.weight, &p.targets.to_kind(Kind::Int))), "targets");
    let wide = p.weight.to_kind(Kind::Double);
    assert_eq!(setting(&Inputs::new(&p.hidden, &wide, &p.targets)), "weight");
    assert_eq!(setting(&Inputs::new(&p.targets.view([6, 1]), &wide.narrow(1, 0, 1), &p.targets)), "hidden");
    assert_eq!(setting(&p.inputs().bias(&p.hidden)), "bias");
    assert_eq!(setting(&p.inputs().bias(&wide.select(1, 0))), "bias");
    assert_eq!(setting(&p.inputs().token_weights(&p.targets)), "token_weights");
    let learned = p.token_weights.copy().set_requires_grad(true);
    assert_eq!(setting(&p.inputs().token_weights(&learned)), "token_weights");
    for config in [
        Config::default().label_smoothing(1.5),
        Config::default().label_smoothing(f64::NAN),
        Config::default().z_loss(-1.0),
        Config::default().chunk_bytes(0),
    ] {
        assert!(matches!(LinearCrossEntropy::new(config), Err(Error::Config { .. })), "{config:?}");
    }
}

#[test]
fn evaluation_counts_what_argmax_counts_and_holds_no_graph() {
    let _guard = serial();
    let mut whole = Evaluation::default();
    let (mut sum, mut correct) = (0.0, 0);
    for kind in [Kind::Float, Kind::Double] {
        let p = Problem::new(200, 2, 6, kind);
        let loss = LinearCrossEntropy::new(Config::default().chunk_bytes(400).label_smoothing(0.3)).unwrap();
        let before = live();
        whole += loss.evaluate(&p.inputs().bias(&p.bias)).unwrap();
        assert_eq!(live(), before);
        let with = With { bias: true, sum: true, ..Default::default() };
        sum += with.plain(&p.exact()).double_value(&[]);
        let best = p.hidden.linear(&p.weight, Some(&p.bias)).argmax(-1, false);
        correct += best.eq_tensor(&p.targets).sum(Kind::Int64).int64_value(&[]) as u64;
    }
    assert_eq!((whole.tokens, whole.correct), (398, correct));
    assert!((whole.sum / sum - 1.0).abs() < 1e-6);
    assert!((whole.perplexity().ln() - sum / 398.0).abs() < 1e-6);
    assert!((whole.accuracy() - correct as f64 / 398.0).abs() < 1e-12);
    // Of equal logits the first is the highest.
    let flat = Tensor::zeros([3, 2], (Kind::Float, Device::Cpu));
    let tied = evaluate_cross_entropy(&flat, &flat, &Tensor::from_slice(&[0i64, 1, 0])).unwrap();
    assert_eq!(tied.correct, 2);
}

#[test]
fn half_precision_is_within_its_rounding() {
    let _guard = serial();
    for (kind, tolerance) in [(Kind::BFloat16, 2e-2), (Kind::Half, 3e-3)] {
        for with in cases() {
            let p = Problem::new(70, 16, 90, kind);
            let exact = p.exact();
            let truth = with.plain(&exact);
            let wanted = gradients(&exact, &truth, with);
            let fused = with.fused(&p, 2000);
            assert_eq!(fused.loss.kind(), Kind::Float);
            assert!(difference(&fused.loss, &truth) < tolerance * truth.abs().double_value(&[]).max(1.0));
            for (found, wanted) in gradients(&p, &fused.loss, with).iter().zip(&wanted) {
                assert_eq!(found.kind(), kind);
                let error = difference(found, wanted) / wanted.abs().max().double_value(&[]);
                assert!(error < tolerance, "{kind:?} {with:?} {error}");
            }
        }
    }
}

/// A two-layer model whose loss is fused or plain.
struct Model {
    vs: nn::VarStore,
    up: nn::Linear,
    head: nn::Linear,
}

impl Model {
    fn new() -> Self {
        memfit::tch::manual_seed(3);
        let vs = nn::VarStore::new(Device::Cpu);
        let up = nn::linear(vs.root() / "up", 6, 16, Default::default());
        let head = nn::linear(vs.root() / "head", 16, 40, Default::default());
        Self { vs, up, head }
    }

    fn loss(&self, fused: bool, x: &Tensor, targets: &Tensor) -> Loss {
        let hidden = x.apply(&self.up).tanh();
        if fused {
            let loss = LinearCrossEntropy::new(Config::default().chunk_bytes(700)).unwrap();
            let inputs = Inputs::new(&hidden, &self.head.ws, targets);
            let inputs = match &self.head.bs {
                Some(bias) => inputs.bias(bias),
                None => inputs,
            };
            return loss.loss(&inputs).unwrap().into_loss();
        }
        let logits = hidden.apply(&self.head).to_kind(Kind::Float);
        let n = targets.ne(IGNORED).sum(Kind::Int64).int64_value(&[]);
        Loss::mean(logits.cross_entropy_for_logits(targets), n)
    }
}

fn batches() -> Vec<(Tensor, Tensor)> {
    memfit::tch::manual_seed(11);
    (0..6)
        .map(|index| {
            let rows = 10 + 3 * index;
            let x = Tensor::randn([rows, 6], (Kind::Float, Device::Cpu));
            let targets = Tensor::randint(40, [rows], (Kind::Int64, Device::Cpu));
            let _ = targets.narrow(0, 0, index).fill_(IGNORED);
            (x, targets)
        })
        .collect()
}

/// Trains six micro-batches in windows of three.
fn train(fused: bool, bf16: bool, offload: bool) -> Vec<Tensor> {
    let model = Model::new();
    let mut stack = Stack::of(&model.vs, sgd(&model.vs)).with(GradAccumulator::every(3));
    if bf16 {
        stack = stack.with(AmpScaler::bf16());
    }
    if offload {
        stack = stack.with(CpuOffload::activations().disk(std::env::temp_dir()).min_bytes(0));
    }
    let mut training = stack.build().unwrap();
    for (x, targets) in batches() {
        let _ = training.step_with(|| Ok(model.loss(fused, &x, &targets))).unwrap();
    }
    support::copies(&model.vs.trainable_variables())
}

#[test]
fn under_windows_autocast_and_offload_it_trains_as_the_plain_loss() {
    let _guard = serial();
    for (bf16, offload, tolerance) in
        [(false, false, 2e-6), (false, true, 2e-6), (true, false, 1e-2), (true, true, 1e-2)]
    {
        let (fused, plain) = (train(true, bf16, offload), train(false, bf16, offload));
        for (fused, plain) in fused.iter().zip(&plain) {
            let error = difference(fused, plain);
            assert!(error < tolerance, "bf16 {bf16} offload {offload}: {error}");
        }
        assert!(support::same(&fused, &train(true, bf16, false)), "offload changes bits");
    }
}

#[test]
fn under_autocast_the_products_are_bf16_and_the_softmax_fp32() {
    let _guard = serial();
    let p = Problem::new(64, 32, 100, Kind::Float);
    let narrow = |t: &Tensor| t.detach().to_kind(Kind::BFloat16).to_kind(Kind::Float);
    let fused =
        autocast(Device::Cpu, Kind::BFloat16, || Ok(With::default().fused(&p, 1 << 30).loss)).unwrap();
    assert_eq!(fused.kind(), Kind::Float);
    let logits = narrow(&narrow(&p.hidden).linear(&narrow(&p.weight), None::<&Tensor>));
    let wanted = logits.cross_entropy_for_logits(&p.targets);
    assert!(difference(&fused, &wanted) < 1e-3, "{fused:?} {wanted:?}");
    let found = gradients(&p, &fused, With::default());
    assert!(found.iter().all(|grad| grad.kind() == Kind::Float));
    // fp64 is left alone, as autocast does.
    let exact = p.exact();
    let double =
        autocast(Device::Cpu, Kind::BFloat16, || Ok(With::default().fused(&exact, 1 << 30).loss)).unwrap();
    assert!(difference(&double, &With::default().plain(&exact)) < 1e-12);
}

#[test]
fn in_a_checkpointed_segment_it_is_bit_equal() {
    let _guard = serial();
    let p = Problem::new(50, 8, 30, Kind::Float);
    let with = With::default();
    let plain = gradients(&p, &with.fused(&p, 1000).loss, with);
    let shared = Shared::new((p.weight.shallow_clone(), p.targets.shallow_clone()));
    let before = live();
    let out = memfit::checkpoint(&shared, &p.hidden, |(weight, targets), xs: &Tensor| {
        let loss = LinearCrossEntropy::new(Config::default().chunk_bytes(1000)).unwrap();
        loss.loss(&Inputs::new(&xs.tanh(), weight, targets)).unwrap().loss
    })
    .unwrap();
    assert!(live() - before < 4 * 50 * 8, "the segment keeps no gradient");
    drop(out);
    let out = memfit::checkpoint(&shared, &p.hidden, |(weight, targets), xs: &Tensor| {
        let loss = LinearCrossEntropy::new(Config::default().chunk_bytes(1000)).unwrap();
        loss.loss(&Inputs::new(xs, weight, targets)).unwrap().loss
    })
    .unwrap();
    assert!(support::same(&gradients(&p, &out, with), &plain));
}

#[test]
fn a_weight_changed_before_backward_leaves_the_gradient_of_what_forward_saw() {
    let _guard = serial();
    let p = Problem::new(9, 4, 7, Kind::Float);
    let wanted = gradients(&p, &With::default().fused(&p, 60).loss, With::default());
    let loss = With::default().fused(&p, 60).loss;
    let _ = no_grad(|| p.weight.shallow_clone().fill_(5.0));
    assert!(support::same(&gradients(&p, &loss, With::default()), &wanted));
}

#[test]
fn a_thousand_steps_and_evaluations_leave_nothing_behind() {
    let _guard = serial();
    let p = Problem::new(20, 4, 15, Kind::Float);
    let turn = || {
        With::default().fused(&p, 200).loss.backward();
        let _ = evaluate_cross_entropy(&p.hidden, &p.weight, &p.targets).unwrap();
    };
    turn();
    let before = live();
    (0..1000).for_each(|_| turn());
    assert_eq!(live(), before);
}

#[test]
fn running_out_of_memory_in_any_allocation_is_the_typed_error() {
    let _guard = serial();
    let p = Problem::new(20, 4, 15, Kind::BFloat16);
    let before = live();
    let mut failed = 0;
    for n in 1.. {
        let fail = memfit::memory::FailAt::nth(n).unwrap();
        let loss = LinearCrossEntropy::new(Config::default().chunk_bytes(200)).unwrap();
        let found = loss.loss(&p.inputs().bias(&p.bias));
        drop(fail);
        match found {
            Err(error) => assert!(error.is_out_of_memory(), "{error}"),
            Ok(_) => break,
        }
        assert_eq!(live(), before);
        failed += 1;
    }
    assert!(failed >= 6, "{failed}");
}
