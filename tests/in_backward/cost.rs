//! What gradients, windows and batches take.

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
