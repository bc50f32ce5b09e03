//! Loss and gradients are the plain form's.

use super::*;

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
    for (kind, bound) in [(Kind::Float, 2e-6), (Kind::BFloat16, 2e-2), (Kind::Half, 3e-3)] {
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

/// Puts the number of libtorch's threads back.
struct Threads(i32);

impl Threads {
    fn set(threads: i32) -> Self {
        let former = memfit::tch::get_num_threads();
        memfit::tch::set_num_threads(threads);
        Self(former)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        memfit::tch::set_num_threads(self.0);
    }
}

/// The sums over tokens are in one order; what splits a product over threads is libtorch's.
#[test]
fn two_runs_give_the_same_bits_and_threads_change_only_products() {
    let _guard = serial();
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        // Logits that no split of a product changes: what else would differ is ours.
        let p = Problem::new(300, 8, 500, kind).rounded();
        let with = With { bias: true, smoothing: 0.1, ..Default::default() };
        let run = |threads: i32| {
            let _threads = Threads::set(threads);
            let loss = with.fused(&p, 20_000).loss;
            let mut all = gradients(&p, &loss, with);
            all.push(loss.detach());
            all
        };
        let (one, again, two, three) = (run(1), run(1), run(2), run(3));
        assert!(support::same(&one, &again), "{kind:?}");
        for other in [two, three] {
            assert!(support::same(&one[3..], &other[3..]), "{kind:?}");
            for (one, other) in one.iter().zip(&other) {
                let size = one.abs().max().double_value(&[]);
                let (error, last) = (difference(one, other), if kind == Kind::Float { 1e-6 } else { 1e-2 });
                assert!(error <= last * size, "{kind:?} {error} of {size}");
            }
        }
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
fn a_weight_changed_before_backward_leaves_the_gradient_of_what_forward_saw() {
    let _guard = serial();
    let p = Problem::new(9, 4, 7, Kind::Float);
    let wanted = gradients(&p, &With::default().fused(&p, 60).loss, With::default());
    let loss = With::default().fused(&p, 60).loss;
    let _ = no_grad(|| p.weight.shallow_clone().fill_(5.0));
    assert!(support::same(&gradients(&p, &loss, With::default()), &wanted));
}
