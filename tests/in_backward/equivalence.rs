//! The same weights as with an update after backward.

use super::*;

/// Cases 41, 42 and 47: tied, absent and frozen parameters.
#[test]
fn every_optimizer_moves_as_it_does_after_backward() {
    let _guard = serial();
    for (name, make) in OPTIMIZERS {
        for checkpointed in [false, true] {
            let (wanted, got) = pair(make, checkpointed, &[4, 4, 3, 5], |batch| batch % 2 == 0, |with| with);
            assert!(same(&wanted, &got), "{name}, checkpointed: {checkpointed}");
        }
    }
}

/// Case 48.
#[test]
fn precision_schedules_and_offload_change_nothing() {
    let _guard = serial();
    let with: [fn(StackBuilder) -> StackBuilder; 3] = [
        |with| with.with(AmpScaler::bf16()).with(Cosine::new(8).warm_up(2)),
        |with| with.with(CpuOffload::activations().disk(std::env::temp_dir()).min_bytes(0)),
        |with| with.with(Budget::parse("1GiB").unwrap()).with(Cosine::new(4)),
    ];
    for (name, make) in OPTIMIZERS {
        for (index, with) in with.into_iter().enumerate() {
            let (wanted, got) = pair(make, index != 1, &[4, 4, 3, 5], |_| true, with);
            assert!(same(&wanted, &got), "{name}, stack {index}");
        }
    }
}

#[test]
fn state_on_disk_arrives_in_backward() {
    let _guard = serial();
    for (name, make) in OPTIMIZERS {
        let after = Model::new(true);
        let mut training = Stack::of(&after.vs, make(&after.vs)).build().unwrap();
        let wanted = train(&mut training, &after, &[4, 3, 5], |batch| batch != 1).unwrap();
        for disk in [false, true] {
            let model = Model::new(true);
            let home = CpuOffload::optimizer(make(&model.vs));
            let away = if disk { home.disk(std::env::temp_dir()) } else { home.resident() }.unwrap();
            let observer = away.observer();
            let mut training = Stack::of(&model.vs, InBackward::new(away).unwrap()).build().unwrap();
            let got = train(&mut training, &model, &[4, 3, 5], |batch| batch != 1).unwrap();
            assert!(same(&wanted, &got), "{name}, on disk: {disk}");
            assert_eq!(observer.moved().in_bytes > 0, disk && name != "plain", "{name}");
        }
    }
}

/// Case 41: windows, a parameter absent from the last micro-batch or from all.
#[test]
fn plain_sgd_in_windows_is_bitwise() {
    let _guard = serial();
    let with: [fn(StackBuilder) -> StackBuilder; 2] =
        [|with| with.with(GradAccumulator::every(3)), |with| with.with(GradAccumulator::tokens(9))];
    for with in with {
        let uses = |batch: usize| batch == 1 || batch == 5;
        let (wanted, got) = pair(|vs| Box::new(plain(vs)), true, &[4, 4, 2, 3, 5, 4, 6], uses, with);
        assert!(same(&wanted, &got));
    }
}

/// Case 41: the momentum takes every micro-batch's gradient; the last window is short.
#[test]
fn momentum_in_windows_is_the_same_sum() {
    let _guard = serial();
    let makers: [Maker; 3] = [
        |vs| Box::new(heavy(vs)),
        |vs| Box::new(Sgd::new(vs, momentum().dampening(0.5)).unwrap()),
        |vs| Box::new(CpuOffload::optimizer(heavy(vs)).disk(std::env::temp_dir()).unwrap()),
    ];
    for make in makers {
        // `rare` is in an early micro-batch only, in none of the second window's, in the last one's.
        let uses = |batch: usize| [0, 6, 7].contains(&batch);
        let (wanted, got) = pair(make, true, &[4; 8], uses, |with| with.with(GradAccumulator::every(3)));
        for (a, b) in wanted.iter().zip(&got) {
            assert!(difference(a, b) < 2e-6, "{}", difference(a, b));
        }
    }
}

/// Both by arithmetic: g = 2 then 4 in a window of two, twice.
#[test]
fn a_dampened_momentum_in_windows_follows_the_formula() {
    let _guard = serial();
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
        let mut vs = nn::VarStore::new(Device::Cpu);
        let w = vs.root().zeros("w", &[1]);
        vs.set_kind(kind);
        let config = SgdConfig::default().lr(1.0).momentum(0.5).dampening(0.25);
        let optimizer = InBackward::new(Sgd::new(&vs, config).unwrap()).unwrap();
        let mut training = Stack::of(&vs, optimizer).with(GradAccumulator::every(2)).build().unwrap();
        for factor in [2.0, 4.0, 2.0, 4.0] {
            let _ = training.step_with(|| Ok(Loss::mean((&w * factor).sum(kind), 1))).unwrap();
            assert!(!w.grad().defined(), "the gradient is in the momentum");
        }
        // v = 3 undampened, then 0.5 · 3 + 0.75 · 3.
        assert_eq!(values(&w), [-(3.0 + 3.75)]);
    }
}

#[test]
fn a_whole_batch_splits_into_equal_micro_batches() {
    let _guard = serial();
    let run = |early: bool| {
        let model = nn::VarStore::new(Device::Cpu);
        memfit::tch::manual_seed(1);
        let layer = nn::linear(model.root(), 6, 3, Default::default());
        let builder = if early {
            Stack::of(&model, InBackward::new(heavy(&model)).unwrap())
        } else {
            Stack::of(&model, heavy(&model))
        };
        let mut training = builder.with(GradAccumulator::every(4)).build().unwrap();
        for batch in batches(&[8, 12]) {
            let outcome = training.step_batch(&batch, |x| {
                Ok(Loss::mean(layer.forward(x).square().mean(Kind::Float), x.size()[0]))
            });
            assert!(outcome.unwrap().stepped());
        }
        copies(&model.trainable_variables())
    };
    for (a, b) in run(false).iter().zip(&run(true)) {
        assert!(difference(a, b) < 1e-6);
    }
}

/// A transposed leaf gets a gradient with the strides of the leaf; one that is computed by a
/// transposed product does not.
#[test]
fn strides_do_not_matter_to_a_momentum_in_windows() {
    let _guard = serial();
    let run = |early: bool| {
        memfit::tch::manual_seed(1);
        let w = Tensor::randn([5, 300], CPU).tr().set_requires_grad(true);
        let none: [Tensor; 0] = [];
        let list = vec![Named::new("w", &w)];
        let sgd = Sgd::new(&list, momentum()).unwrap();
        let builder = if early {
            Stack::tensors(&list, &none[..], InBackward::new(sgd).unwrap())
        } else {
            Stack::tensors(&list, &none[..], sgd)
        };
        let mut training = builder.with(GradAccumulator::every(2)).build().unwrap();
        for _ in 0..4 {
            let x = Tensor::randn([7, 300], CPU);
            let _ = training.step_with(|| Ok(Loss::mean(x.matmul(&w).square().mean(Kind::Float), 1)));
        }
        copies(&[w])
    };
    assert!(difference(&run(false)[0], &run(true)[0]) < 1e-6);
}

#[test]
fn added_and_unfrozen_parameters_join_in() {
    let _guard = serial();
    let vs = nn::VarStore::new(Device::Cpu);
    let a = vs.root().zeros("a", &[1]);
    let b = vs.root().zeros("b", &[1]).set_requires_grad(false);
    let optimizer = InBackward::new(Sgd::new(&vs, SgdConfig::default().lr(1.0)).unwrap()).unwrap();
    let mut training = Stack::of(&vs, optimizer).build().unwrap();
    let c = Tensor::zeros([1], CPU).set_requires_grad(true);
    let loss = || Ok(Loss::of((&a + &b + &c).sum(Kind::Float)));
    let _ = training.step_with(loss).unwrap();
    let _ = b.set_requires_grad(true);
    training.add_group(vec![Named::new("c", &c)], GroupOptions::default().lr(0.5)).unwrap();
    let _ = training.step_with(loss).unwrap();
    assert_eq!((values(&a), values(&b), values(&c)), (vec![-2.0], vec![-1.0], vec![-0.5]));
}
