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
