//! bf16 and fp16: within their rounding, and within fp16's range.

use super::*;

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

/// Sizes at which fp16 sums of logits' gradients of size 1 overflow, or small ones vanish.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    tokens: i64,
    classes: i64,
    hidden: f64,
    weight: f64,
    token: f64,
    z: f64,
    loss_scale: f64,
}

impl Sizes {
    /// All tokens of one class, so that nothing cancels; hidden all alike but for some noise.
    fn problem(&self, kind: Kind) -> Problem {
        let cpu = |kind| (kind, Device::Cpu);
        let leaf = |t: Tensor| t.to_kind(kind).set_requires_grad(true);
        let noise = Tensor::randn([self.tokens, 8], cpu(Kind::Double)) * 0.1 + 1.0;
        Problem {
            hidden: leaf(noise * self.hidden),
            weight: leaf(Tensor::randn([self.classes, 8], cpu(Kind::Double)) * self.weight),
            bias: leaf(Tensor::zeros([self.classes], cpu(Kind::Double))),
            targets: Tensor::zeros([self.tokens], cpu(Kind::Int64)),
            token_weights: (Tensor::rand([self.tokens], cpu(Kind::Float)) + 0.5) * self.token,
        }
    }

    fn with(&self) -> With {
        let seed = Some(self.loss_scale);
        With { bias: true, token_weights: self.token != 1.0, z: self.z, seed, ..Default::default() }
    }
}

/// Gradients against fp64 on the same values, in units of the largest.
fn error_in_fp16(sizes: Sizes, kind: Kind, chunk: u64) -> Vec<f64> {
    let p = sizes.problem(kind);
    let with = sizes.with();
    let exact = p.exact();
    let wanted = gradients(&exact, &with.plain(&exact), with);
    let fused = autocast(Device::Cpu, Kind::Half, || Ok(with.fused(&p, chunk))).unwrap();
    let found = gradients(&p, &fused.loss, with);
    let error = |(f, w): (&Tensor, &Tensor)| difference(f, w) / w.abs().max().double_value(&[]).max(1e-300);
    found.iter().zip(&wanted).map(error).collect()
}

const USUAL: Sizes =
    Sizes { tokens: 64, classes: 50, hidden: 1.0, weight: 0.1, token: 1.0, z: 0.0, loss_scale: 1.0 };

/// The loss scale, which might have helped, acts in backward only.
#[test]
fn in_fp16_no_gradient_overflows_whatever_a_chunk_adds_up() {
    let _guard = serial();
    let many = Sizes { tokens: 8192, classes: 1000, hidden: 10.0, weight: 0.0, ..USUAL };
    let cases = [
        (many, Kind::Float),
        (Sizes { loss_scale: 65536.0, ..many }, Kind::Float),
        (many, Kind::Half),
        (Sizes { token: 2e5, ..USUAL }, Kind::Float),
        (Sizes { token: 1e-9, ..USUAL }, Kind::Float),
        (Sizes { hidden: 2e4, weight: 5e-5, ..USUAL }, Kind::Float),
        (Sizes { hidden: 1e-3, ..USUAL }, Kind::Half),
        (Sizes { weight: 200.0, hidden: 0.01, ..USUAL }, Kind::Half),
        (Sizes { z: 0.5, ..USUAL }, Kind::Float),
        (Sizes { loss_scale: 65536.0, ..USUAL }, Kind::Float),
    ];
    for (sizes, kind) in cases {
        let errors = error_in_fp16(sizes, kind, 16 << 20);
        assert!(errors.iter().all(|error| *error < 4e-3), "{sizes:?} {kind:?}: {errors:?}");
    }
}

#[test]
fn in_fp16_many_chunks_are_as_good_as_one() {
    let _guard = serial();
    let sizes = Sizes { tokens: 4096, hidden: 5.0, ..USUAL };
    for kind in [Kind::Float, Kind::Half] {
        let (one, many) = (error_in_fp16(sizes, kind, 16 << 20), error_in_fp16(sizes, kind, 50 * 2 * 16));
        for (one, many) in one.iter().zip(&many) {
            assert!(*one < 4e-3 && *many < 2.0 * one.max(1e-3), "{kind:?} {one} {many}");
        }
    }
}

/// Classes of probability e⁻¹⁶, which logits' gradients of size 1 hold with two bits.
#[test]
fn in_fp16_small_probabilities_do_not_vanish() {
    let _guard = serial();
    let (tokens, classes) = (32, 50);
    let weight = Tensor::zeros([classes, 1], (Kind::Float, Device::Cpu));
    let _ = weight.get(0).fill_(16.0);
    let weight = weight.set_requires_grad(true);
    let hidden = Tensor::ones([tokens, 1], (Kind::Float, Device::Cpu));
    let targets = Tensor::zeros([tokens], (Kind::Int64, Device::Cpu));
    let loss =
        autocast(Device::Cpu, Kind::Half, || Ok(linear_cross_entropy(&hidden, &weight, &targets)?.loss));
    let found = Tensor::run_backward(&[loss.unwrap()], &[&weight], false, false).remove(0);
    let power = (-16f64).exp();
    let wanted = power / (1.0 + f64::from(classes as i32 - 1) * power);
    for class in 1..classes {
        let error = found.double_value(&[class, 0]) / wanted - 1.0;
        assert!(error.abs() < 1e-2, "{class}: {error}");
    }
}

/// Trains until the loss scale lets a step through; the weights then, and the steps skipped.
fn first_step(fused: bool, head_only: bool) -> (Vec<Tensor>, usize) {
    memfit::tch::manual_seed(3);
    let vs = nn::VarStore::new(Device::Cpu);
    let up = nn::linear(vs.root() / "up", 4, 8, Default::default());
    if head_only {
        let _ = up.ws.set_requires_grad(false);
        up.bs.as_ref().map(|bias| bias.set_requires_grad(false));
    }
    let config = nn::LinearConfig { bias: false, ..Default::default() };
    let head = nn::linear(vs.root() / "head", 8, 200, config);
    let tokens = 8192;
    let x = Tensor::randn([tokens, 4], (Kind::Float, Device::Cpu));
    let targets = Tensor::zeros([tokens], (Kind::Int64, Device::Cpu));
    let mut training = Stack::of(&vs, sgd(&vs)).with(AmpScaler::fp16()).build().unwrap();
    for skipped in 0..20 {
        let outcome = training.step_with(|| {
            let hidden = x.apply(&up).tanh() * 10.0 + 10.0;
            if fused {
                return Ok(linear_cross_entropy(&hidden, &head.ws, &targets)?.into_loss());
            }
            let logits = hidden.apply(&head).to_kind(Kind::Float);
            Ok(Loss::mean(logits.cross_entropy_for_logits(&targets), tokens))
        });
        if outcome.unwrap().stepped() {
            return (support::copies(&vs.trainable_variables()), skipped);
        }
    }
    panic!("no loss scale lets a step through");
}

#[test]
fn under_the_fp16_scaler_many_tokens_train_as_in_the_plain_form() {
    let _guard = serial();
    for head_only in [true, false] {
        let ((fused, skipped), (plain, plain_skipped)) =
            (first_step(true, head_only), first_step(false, head_only));
        // The plain form's fp16 sums times 65536 overflow; these are in fp32 by then.
        assert!(if head_only { skipped == 0 && plain_skipped > 0 } else { skipped <= plain_skipped });
        for (fused, plain) in fused.iter().zip(&plain) {
            let size = plain.abs().max().double_value(&[]);
            let error = difference(fused, plain) / size;
            assert!(error < 4e-3, "{error}");
        }
    }
}
