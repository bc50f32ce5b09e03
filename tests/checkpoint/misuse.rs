//! Changes, other branches, panics and errors.

use super::*;

/// Case 29.
#[test]
fn a_change_in_place_between_forward_and_backward_is_an_error() {
    let _guard = serial();
    let weights = vec![leaf(&[4, 4]), leaf(&[4])];
    let block = ActivationCheckpoint::new(Block {
        weights: clones(&weights),
        body: |w, x| (x.matmul(&w[0]) + &w[1]).tanh(),
    });
    let x = leaf(&[2, 4]);
    let input = &x * 1.0;
    // A weight, a bias that no operator saves, and the segment's input.
    for changed in [&weights[0], &weights[1], &input] {
        let y = block.forward(&input).sum(Kind::Float);
        let _ = tch::no_grad(|| changed.shallow_clone().g_add_scalar_(1.0));
        let error = backward(&y).unwrap_err();
        assert!(matches!(error, Error::Modified { .. }), "{error:?}");
    }
    // The output is not read again: its gradient is that of what forward saw.
    let once = || {
        let y = block.forward(&input);
        let y = y.shallow_clone();
        x.shallow_clone().zero_grad();
        y
    };
    once().sum(Kind::Float).backward();
    let right = x.grad().copy();
    let y = once();
    let mut seen = y.detach();
    let _ = seen.fill_(0.0);
    y.sum(Kind::Float).backward();
    assert_eq!(x.grad(), right);
}

/// Case 29: a frozen, registered bias is watched; an optimizer's step is a change.
#[test]
fn a_frozen_bias_and_an_optimizer_step_are_changes_too() {
    let _guard = serial();
    let bias = Tensor::randn([4], FLOAT);
    let _registration = memfit::saved::register(&[memfit::Named::new("head.bias", &bias)]).unwrap();
    let block = ActivationCheckpoint::new(Block {
        weights: vec![leaf(&[4, 4]), bias.shallow_clone()],
        body: |w, x| (x.matmul(&w[0]) + &w[1]).tanh(),
    });
    let y = block.forward(&leaf(&[2, 4])).sum(Kind::Float);
    let _ = bias.shallow_clone().fill_(0.0);
    let error = backward(&y).unwrap_err();
    assert!(error.to_string().contains("head.bias"), "{error}");

    let vs = nn::VarStore::new(Device::Cpu);
    let linear = nn::linear(vs.root(), 4, 4, Default::default());
    let mut adam = nn::OptimizerConfig::build(nn::Adam::default(), &vs, 0.1).unwrap();
    let block = ActivationCheckpoint::new(linear);
    let x = leaf(&[2, 4]);
    block.forward(&x).tanh().sum(Kind::Float).backward();
    let y = block.forward(&x).tanh().sum(Kind::Float);
    adam.step();
    assert!(matches!(backward(&y), Err(Error::Modified { .. })));
}

/// Case 30.
#[test]
fn another_branch_in_the_recompute_names_the_segment() {
    let _guard = serial();
    let switch = Tensor::zeros([], FLOAT);
    let block = |body| {
        ActivationCheckpoint::new(Block { weights: vec![leaf(&[4, 4]), switch.shallow_clone()], body })
            .named("router")
    };
    let set = |to: f64| switch.shallow_clone().set_data(&Tensor::full([], to, FLOAT));
    let bodies: [fn(&[Tensor], &Tensor) -> Tensor; 3] = [
        // Fewer, more, and another shape.
        |w, x| if w[1].double_value(&[]) > 0.5 { x * 2.0 } else { x.matmul(&w[0]).tanh() },
        |w, x| {
            if w[1].double_value(&[]) > 0.5 {
                x.matmul(&w[0]).tanh().sin()
            } else {
                x.matmul(&w[0]).sigmoid()
            }
        },
        |w, x| {
            if w[1].double_value(&[]) > 0.5 { x.i(..1).matmul(&w[0]).tanh() } else { x.matmul(&w[0]).tanh() }
        },
    ];
    for (index, body) in bodies.into_iter().enumerate() {
        let block = block(body).early_stop(EarlyStop::Off);
        set(0.0);
        let y = block.forward(&leaf(&[2, 4])).sum(Kind::Float);
        set(1.0);
        match backward(&y) {
            Err(Error::RecomputeMismatch { segment, .. }) => assert_eq!(segment, "router"),
            other => panic!("{index}: {other:?}"),
        }
    }
    // Same shapes, other values.
    let body: fn(&[Tensor], &Tensor) -> Tensor = |w, x| (x.matmul(&w[0]) * w[1].double_value(&[])).tanh();
    for checked in [true, false] {
        let block = if checked { block(body).checked() } else { block(body) };
        set(0.5);
        let y = block.forward(&leaf(&[2, 4])).sum(Kind::Float);
        set(1.0);
        assert_eq!(matches!(backward(&y), Err(Error::RecomputeMismatch { .. })), checked);
    }
}

/// Case 33.
#[test]
fn a_panic_in_forward_or_recompute_is_an_error_and_the_next_step_works() {
    let _guard = serial();
    let switch = Tensor::zeros([], FLOAT);
    let set = |to: f64| switch.shallow_clone().set_data(&Tensor::full([], to, FLOAT));
    let block = ActivationCheckpoint::new(Block {
        weights: vec![leaf(&[4, 4]), switch.shallow_clone()],
        body: |w, x| {
            let y = x.matmul(&w[0]).dropout(0.5, true);
            tch::no_grad(|| assert!(w[1].double_value(&[]) < 0.5, "the cable is out"));
            y.tanh()
        },
    });
    let x = leaf(&[2, 4]);
    let is_cable = |error: &Error| matches!(error, Error::Panic { message, .. } if message.contains("cable"));
    set(1.0);
    let error = block.try_forward(&x).unwrap_err();
    assert!(is_cable(&error), "{error:?}");
    set(0.0);
    let y = block.try_forward(&x).unwrap().sum(Kind::Float);
    set(1.0);
    tch::manual_seed(3);
    let error = backward(&y).unwrap_err();
    assert!(is_cable(&error), "{error:?}");
    let next = Tensor::rand([3], FLOAT);
    tch::manual_seed(3);
    assert_eq!(next, Tensor::rand([3], FLOAT), "the generator is where the step left it");
    drop(y);
    // Gradients are on, no link is left: a plain operator saves its tensors as ever.
    set(0.0);
    let before = live();
    let z = (&x * 2.0).tanh();
    assert!(z.requires_grad());
    assert_eq!(live() - before, 2 * 4 * 4);
    block.try_forward(&x).unwrap().sum(Kind::Float).backward();
    assert!(x.grad().defined());
}

/// Case 33, inside a step: the error keeps its type through forward and backward.
#[test]
fn inside_a_step_a_segments_error_is_the_steps_error() {
    use memfit::optim::{Sgd, SgdConfig};
    use memfit::{Loss, Stack};
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let (weight, bias) = (vs.root().randn("weight", &[4, 4], 0.0, 1.0), vs.root().zeros("bias", &[4]));
    let switch = Tensor::zeros([], FLOAT);
    let set = |to: f64| switch.shallow_clone().set_data(&Tensor::full([], to, FLOAT));
    let block = ActivationCheckpoint::new(Block {
        weights: vec![weight.shallow_clone(), bias.shallow_clone(), switch.shallow_clone()],
        body: |w, x| {
            let y = x.matmul(&w[0]) + &w[1];
            match w[2].double_value(&[]) as i64 {
                0 => y.tanh().sin(),
                1 => y.sigmoid(),
                _ => y.matmul(&Tensor::zeros([3, 3], FLOAT)),
            }
        },
    })
    .named("head");
    let sgd = Sgd::new(&vs, SgdConfig::default().lr(0.1)).unwrap();
    let mut training = Stack::of(&vs, sgd).build().unwrap();
    let x = Tensor::ones([2, 4], FLOAT);
    let before = weight.detach().copy();
    // Another branch in the recompute than in forward.
    set(0.0);
    let error = training
        .step_with(|| {
            let loss = block.forward(&x).sum(Kind::Float);
            set(1.0);
            Ok(Loss::of(loss))
        })
        .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("`head`") && text.contains("recompute"), "{text}");
    // A failure in forward.
    set(2.0);
    let error = training.step_with(|| Ok(Loss::of(block.forward(&x).sum(Kind::Float)))).unwrap_err();
    assert!(error.to_string().contains("libtorch") || error.to_string().contains("panic"), "{error}");
    assert_eq!(weight.detach(), before);
    set(0.0);
    let outcome = training.step_with(|| Ok(Loss::of(block.forward(&x).sum(Kind::Float)))).unwrap();
    assert!(outcome.stepped());
    assert_ne!(weight.detach(), before);
}

#[test]
fn an_error_of_the_closure_keeps_its_type_through_segments() {
    let _guard = serial();
    let shared = Shared::new(());
    let x = leaf(&[2]);
    let error = Segment::named("outer")
        .try_run(&shared, &x, |(), x| -> memfit::Result<Tensor> {
            let inner = Shared::new(());
            Segment::named("inner").try_run(&inner, x, |(), _| Err(Error::config("depth", "too deep")))
        })
        .unwrap_err();
    assert!(matches!(error, Error::Config { setting: "depth", .. }), "{error:?}");
}

/// Case 32.
#[test]
fn a_generator_that_cannot_be_captured_is_a_typed_error() {
    let _guard = serial();
    let error = memfit::rng::Generators::capture(Device::Mps).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
}

/// A segment that swallows the early stop is left all the same, and counts as recomputed.
#[test]
fn a_segment_that_ignores_errors_still_gives_the_right_gradients() {
    let _guard = serial();
    assert_same("swallows", &leaf(&[4, 8]), vec![leaf(&[8, 8])], |w, x| {
        let y = x.matmul(&w[0]).tanh();
        let z = y.f_matmul(&w[0]).unwrap_or_else(|_| y.shallow_clone());
        z.f_mul_scalar(2.0).unwrap_or(z)
    });
}

#[test]
fn two_threads_train_one_shared_module() {
    let _guard = serial();
    let shared = Shared::new(leaf(&[16, 16]));
    let right = {
        let x = Tensor::ones([4, 16], FLOAT).set_requires_grad(true);
        shared.with(|w| x.matmul(w).tanh().sum(Kind::Float).backward()).unwrap();
        x.grad().copy()
    };
    let threads: Vec<_> = (0..2)
        .map(|_| {
            let shared = shared.clone();
            std::thread::spawn(move || {
                (0..50)
                    .map(|_| {
                        let x = Tensor::ones([4, 16], FLOAT).set_requires_grad(true);
                        let y: Tensor = checkpoint(&shared, &x, |w, x| x.matmul(w).tanh()).unwrap();
                        y.sum(Kind::Float).backward();
                        x.grad().copy()
                    })
                    .collect::<Vec<_>>()
            })
        })
        .collect();
    for thread in threads {
        assert!(thread.join().unwrap().iter().all(|grad| grad.equal(&right)));
    }
}
