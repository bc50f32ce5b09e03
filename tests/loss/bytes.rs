//! What it holds, and what is left when memory runs out.

use super::*;

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

/// The loss, its factor and what they are made of.
const SCALARS: u64 = 16;

/// What libtorch's products of a chunk take for themselves: oneDNN repacks an operand, or adds up in fp32, as the
/// processor wants it.
fn scratch(kind: Kind, rows: i64, width: i64, classes: i64) -> u64 {
    let of = |size: [i64; 2]| Tensor::ones(size, (Kind::Float, Device::Cpu)).to_kind(kind);
    let (hidden, weight, logits) = (of([rows, width]), of([classes, width]), of([rows, classes]));
    let products = [(&hidden, &weight.tr()), (&logits, &weight), (&logits.tr(), &hidden)];
    let taken = products.map(|(left, right)| {
        let before = live();
        let scope = PeakScope::new(Device::Cpu).unwrap();
        let product = left.mm(right);
        scope.peak() - before - 2 * product.numel() as u64
    });
    taken.into_iter().max().unwrap_or(0)
}

/// The bytes of docs/memory-model.md, with casts.
#[test]
fn the_peak_under_autocast_and_of_half_weights_is_the_documented_range() {
    let _guard = serial();
    let (n, d, v) = (128u64, 32u64, 1000u64);
    let (chunk, rows, piece) = (2 * 32 * v, 32, 2 * d * v);
    let packed = scratch(Kind::BFloat16, rows as i64, d as i64, v as i64);
    let p = Problem::new(n as i64, d as i64, v as i64, Kind::Float);
    let before = live();
    let scope = PeakScope::new(Device::Cpu).unwrap();
    let fused = autocast(Device::Cpu, Kind::BFloat16, || Ok(With::default().fused(&p, chunk))).unwrap();
    let casts = 2 * v * d + 2 * (2 * rows * d) + piece;
    let documented = 4 * (n * d + v * d) + chunk + casts;
    let peak = scope.peak() - before;
    assert!((documented..=documented + packed + SCALARS).contains(&peak), "{peak} {documented} {packed}");
    drop(fused);

    // fp16 rows are scaled in a copy; backward has a factor of its own for the weight.
    for (kind, scaled, factor) in [(Kind::BFloat16, 0, 0), (Kind::Half, 2 * rows * d, 4)] {
        let packed = scratch(kind, rows as i64, d as i64, v as i64);
        let p = Problem::new(n as i64, d as i64, v as i64, kind);
        let before = live();
        let scope = PeakScope::new(Device::Cpu).unwrap();
        let fused = With::default().fused(&p, chunk);
        let (documented, peak) = (2 * n * d + 4 * v * d + chunk + piece + scaled, scope.peak() - before);
        assert!(
            (documented..=documented + packed + SCALARS).contains(&peak),
            "{kind:?} {peak} {documented} {packed}"
        );
        drop(scope);
        let scope = PeakScope::new(Device::Cpu).unwrap();
        fused.loss.backward();
        let backward = scope.peak() - before - (2 * n * d + 4 * v * d + 2 * v * d + 8);
        assert!(backward <= 2 * factor, "{kind:?} {backward}");
    }
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
