//! What forward saw is what the recompute sees: statistics, counters, dtype, train flag.

use super::*;

/// Case 24.
#[test]
fn batch_norm_moves_its_statistics_once() {
    let _guard = serial();
    let run = |wrapped: bool, backward: bool| {
        tch::manual_seed(1);
        let vs = nn::VarStore::new(Device::Cpu);
        let norm = nn::batch_norm1d(vs.root(), 6, Default::default());
        let norm: Box<dyn ModuleT> =
            if wrapped { Box::new(ActivationCheckpoint::with_train(norm)) } else { Box::new(norm) };
        for _ in 0..3 {
            let x = leaf(&[10, 6]);
            let y = norm.forward_t(&x, true).sin().sum(Kind::Float);
            if backward {
                y.backward();
            }
        }
        let mut all: Vec<_> = vs.variables().into_iter().collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all.into_iter().map(|(_, tensor)| tensor.detach().copy()).collect::<Vec<_>>()
    };
    let right = run(false, true);
    assert!(right.iter().any(|tensor| tensor.double_value(&[0]).abs() > 1e-3));
    assert!(same(&run(true, true), &right));
    assert!(same(&run(true, false), &right));
}

/// Case 24: step counters, and buffers that a user registers.
#[test]
fn counters_and_registered_buffers_move_once() {
    let _guard = serial();
    let counter = Tensor::zeros([], (Kind::Int64, Device::Cpu));
    let average = Tensor::zeros([4], FLOAT);
    let registration = memfit::saved::register(&[memfit::Named::new("average", &average)]).unwrap();
    let block = ActivationCheckpoint::new(Block {
        weights: vec![counter.shallow_clone(), average.shallow_clone()],
        body: |w, x| {
            let _ = w[0].shallow_clone().g_add_scalar_(1);
            let _ = w[1].shallow_clone().g_mul_scalar_(0.5);
            let _ = w[1].shallow_clone().g_add_(&(x.detach().mean_dim(0, false, Kind::Float) * 0.5));
            (x * &w[1]).tanh()
        },
    });
    let x = Tensor::ones([3, 4], FLOAT).set_requires_grad(true);
    for step in 1..=3 {
        block.forward(&x).sum(Kind::Float).backward();
        assert_eq!(counter.int64_value(&[]), step);
    }
    assert_eq!(average.double_value(&[0]), 0.875);
    assert_eq!(block.recomputes(), 3);
    drop(registration);
}

/// Case 2.
#[test]
fn two_segments_that_share_a_linear_under_autocast_give_the_same_bits() {
    let _guard = serial();
    let weights = vec![leaf(&[8, 8]), leaf(&[8])];
    let body: fn(&[Tensor], &Tensor) -> Tensor = |w, x| x.linear(&w[0], Some(&w[1])).tanh();
    let block = Block { weights: clones(&weights), body };
    let wrapped = ActivationCheckpoint::new(Block { weights: clones(&weights), body }).checked();
    let x = leaf(&[4, 8]);
    let run = |module: &dyn Module, inside: bool| {
        let x = x.detach().copy().set_requires_grad(true);
        let forward = || {
            let y = module.forward(&module.forward(&x));
            assert_eq!(y.kind(), Kind::BFloat16);
            let loss = y.to_kind(Kind::Float).square().sum(Kind::Float);
            if inside {
                loss.backward();
            }
            Ok(loss)
        };
        let loss = memfit::strategies::autocast(Device::Cpu, Kind::BFloat16, forward).unwrap();
        if !inside {
            loss.backward();
        }
        let mut all = vec![x.grad().copy()];
        for mut weight in clones(&weights) {
            all.push(weight.grad().copy());
            weight.zero_grad();
        }
        all
    };
    for inside in [true, false] {
        assert!(same(&run(&wrapped, inside), &run(&block, inside)), "backward inside: {inside}");
    }
    assert_eq!(wrapped.recomputes(), 4);
}

/// Case 3.
#[test]
fn a_recompute_computes_in_the_dtype_of_forward() {
    let _guard = serial();
    use std::sync::Mutex;
    static DTYPES: Mutex<Vec<Kind>> = Mutex::new(Vec::new());
    let block = ActivationCheckpoint::new(Block {
        weights: vec![leaf(&[8, 8])],
        body: |w, x| {
            let y = x.matmul(&w[0]);
            DTYPES.lock().unwrap().push(y.kind());
            y.tanh()
        },
    });
    let autocast = |body: &dyn Fn() -> memfit::Result<Tensor>| {
        memfit::strategies::autocast(Device::Cpu, Kind::BFloat16, body).unwrap()
    };
    let y = autocast(&|| Ok(block.forward(&leaf(&[4, 8]))));
    y.to_kind(Kind::Float).sum(Kind::Float).backward();
    // And the other way round: forward without autocast, backward inside a scope.
    let z = block.forward(&leaf(&[4, 8])).sum(Kind::Float);
    let _loss = autocast(&|| {
        z.backward();
        Ok(z.shallow_clone())
    });
    assert_eq!(*DTYPES.lock().unwrap(), [Kind::BFloat16, Kind::BFloat16, Kind::Float, Kind::Float]);
}

/// Loads a module of tests/data, with what a VarStore trains of it.
fn script(file: &str) -> (tch::TrainableCModule, Vec<Tensor>) {
    let vs = nn::VarStore::new(Device::Cpu);
    let path = format!("{}/tests/data/{file}", env!("CARGO_MANIFEST_DIR"));
    let module = tch::TrainableCModule::load(path, vs.root()).unwrap();
    let mut weights: Vec<_> = vs.variables().into_iter().collect();
    weights.sort_by(|a, b| a.0.cmp(&b.0));
    assert!(weights.iter().all(|(_, weight)| weight.requires_grad()));
    (module, weights.into_iter().map(|(_, weight)| weight).collect())
}

/// Cases 25 and 27.
#[test]
fn rrelu_packs_its_noise_before_it_is_drawn_and_is_recomputed_right() {
    let _guard = serial();
    let x = leaf(&[12, 16]);
    let (plain, weights) = script("rrelu.pt");
    let right = pass(&|x| plain.forward_t(x, true), &x, &weights);
    for early_stop in [EarlyStop::On, EarlyStop::Off] {
        let (module, weights) = script("rrelu.pt");
        let block = ActivationCheckpoint::with_train(module).early_stop(early_stop).checked();
        assert!(same(&pass(&|x| block.forward_t(x, true), &x, &weights), &right), "{early_stop:?}");
    }
}

/// Cases 24 and 31.
#[test]
fn a_torchscript_module_trains_in_its_first_and_third_step() {
    let _guard = serial();
    let x = leaf(&[6, 8]);
    let (plain, plain_weights) = script("block.pt");
    let (module, weights) = script("block.pt");
    let block = ActivationCheckpoint::with_train(module).checked();
    for step in 1..=4 {
        // The optimised executor draws dropout's mask in its own way: the plain run is without.
        let unoptimised = |x: &Tensor| {
            tch::jit::set_graph_executor_optimize(false);
            let y = plain.forward_t(x, true);
            tch::jit::set_graph_executor_optimize(true);
            y
        };
        let right = pass(&unoptimised, &x, &plain_weights);
        let got = pass(&|x| block.forward_t(x, true), &x, &weights);
        assert_eq!(got.len(), 7);
        assert!(same(&got, &right), "step {step}");
        let state = |module: &tch::TrainableCModule, of: &str| module.method_ts::<Tensor>(of, &[]).unwrap();
        let tracked = block.with(|module| state(module, "tracked")).unwrap();
        assert_eq!(tracked.int64_value(&[]), step);
        assert_eq!(block.with(|module| state(module, "mean")).unwrap(), state(&plain, "mean"));
        assert_eq!(block.recomputes(), step as u64);
    }
}

/// Case 32.
#[test]
fn the_train_flag_of_forward_is_replayed() {
    let _guard = serial();
    let block = ActivationCheckpoint::with_train(nn::func_t(|x, train| x.tanh().dropout(0.5, train).sin()));
    let x = leaf(&[16, 16]);
    for train in [true, false] {
        let y = block.forward_t(&x, train);
        let _other = tch::no_grad(|| block.forward_t(&x, !train));
        y.sum(Kind::Float).backward();
    }
    assert_eq!(block.recomputes(), 2);
    let mut x = x;
    x.zero_grad();
    block.forward_t(&x, false).sum(Kind::Float).backward();
    let right = x.detach().copy().set_requires_grad(true);
    right.tanh().sin().sum(Kind::Float).backward();
    assert_eq!(x.grad(), right.grad());
}
