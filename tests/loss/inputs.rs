//! What it counts and what it refuses; evaluation.

use super::*;

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
