//! Recompute regions: gradients as without, bytes and recomputes as promised.

mod support;

use memfit::checkpoint::{ActivationCheckpoint, EarlyStop, Segment, Shared, checkpoint};
use memfit::memory;
use memfit::{Error, tch};
use support::{live, same, serial};
use tch::nn::{self, Module, ModuleT};
use tch::{Device, IndexOp, Kind, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn leaf(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, FLOAT).set_requires_grad(true)
}

fn backward(y: &Tensor) -> memfit::Result<()> {
    y.f_backward().map_err(Error::from)
}

/// A block with weights of its own that runs any function over them.
#[derive(Debug)]
struct Block {
    weights: Vec<Tensor>,
    body: fn(&[Tensor], &Tensor) -> Tensor,
}

impl Module for Block {
    fn forward(&self, xs: &Tensor) -> Tensor {
        (self.body)(&self.weights, xs)
    }
}

fn clones(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(Tensor::shallow_clone).collect()
}

/// One training pass: the output, the gradients of the input and of the weights, and what
/// the generator gives next.
fn pass(forward: &dyn Fn(&Tensor) -> Tensor, x: &Tensor, weights: &[Tensor]) -> Vec<Tensor> {
    tch::manual_seed(7);
    let x = x.detach().copy().set_requires_grad(x.requires_grad());
    let y = forward(&x);
    let loss = (&y * y.detach().cos()).sum(Kind::Float);
    loss.backward();
    let mut all = vec![y.detach().copy()];
    for tensor in weights.iter().chain([&x]) {
        let mut tensor = tensor.shallow_clone();
        if tensor.grad().defined() {
            all.push(tensor.grad().copy());
            tensor.zero_grad();
        }
    }
    all.push(Tensor::rand([4], FLOAT));
    all
}

/// Asserts that a segment gives the same bits plain and under every setting.
fn assert_same(what: &str, x: &Tensor, weights: Vec<Tensor>, body: fn(&[Tensor], &Tensor) -> Tensor) {
    let plain = Block { weights: clones(&weights), body };
    let right = pass(&|x| plain.forward(x), x, &weights);
    for early_stop in [EarlyStop::On, EarlyStop::Off] {
        let block = ActivationCheckpoint::new(Block { weights: clones(&weights), body })
            .named(what)
            .early_stop(early_stop)
            .checked();
        let got = pass(&|x| block.forward(x), x, &weights);
        assert!(same(&got, &right), "{what} with early stop {early_stop:?}");
    }
}

/// Case 22.
#[test]
fn dropout_draws_the_same_mask_and_leaves_the_generator_where_it_was() {
    let _guard = serial();
    let x = leaf(&[64, 32]);
    assert_same("dropout", &x, vec![leaf(&[32, 32])], |w, x| x.matmul(&w[0]).dropout(0.5, true).tanh());
    // Pairs of normal samples are drawn two at a time: half a pair stays in the generator.
    assert_same("randn", &x, vec![leaf(&[32, 32])], |w, x| {
        x.matmul(&w[0]) * Tensor::randn([1], FLOAT) * Tensor::randn([3], FLOAT).sum(Kind::Float)
    });
}

/// Case 23.
#[test]
fn an_input_without_gradient_still_gives_the_parameters_theirs() {
    let _guard = serial();
    let w = leaf(&[8, 4]);
    let x = Tensor::randn([2, 8], FLOAT);
    assert_same("first layer", &x, vec![w.shallow_clone()], |w, x| x.matmul(&w[0]).tanh());
    let block = ActivationCheckpoint::new(Block {
        weights: vec![w.shallow_clone()],
        body: |w, x| x.matmul(&w[0]).tanh(),
    });
    block.forward(&x).sum(Kind::Float).backward();
    assert!(w.grad().abs().sum(Kind::Float).double_value(&[]) > 0.0);
}

/// Cases 25 and 27.
#[test]
fn twenty_kinds_of_last_operator_give_the_same_bits() {
    let _guard = serial();
    type Body = fn(&[Tensor], &Tensor) -> Tensor;
    let endings: &[(&str, Body)] = &[
        ("dropout", |w, x| x.matmul(&w[0]).tanh().dropout(0.3, true)),
        ("max pool", |w, x| {
            x.matmul(&w[0]).view([1, 1, 12, 16]).max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false)
        }),
        ("attention", |w, x| {
            let q = x.matmul(&w[0]).view([1, 2, 6, 16]);
            Tensor::scaled_dot_product_attention::<Tensor>(&q, &q.tanh(), &q, None, 0.0, true, None, false)
        }),
        ("attention with dropout", |w, x| {
            let q = x.matmul(&w[0]).view([1, 2, 6, 16]);
            Tensor::scaled_dot_product_attention::<Tensor>(&q, &q, &q, None, 0.2, true, None, false)
        }),
        ("softmax", |w, x| x.matmul(&w[0]).softmax(-1, Kind::Float)),
        ("layer norm", |w, x| x.matmul(&w[0]).layer_norm([16], Some(&w[1]), Some(&w[2]), 1e-5, false)),
        ("batch norm", |w, x| {
            let (mean, var) = (Tensor::zeros([16], FLOAT), Tensor::ones([16], FLOAT));
            x.matmul(&w[0]).batch_norm(
                Some(&w[1]),
                Some(&w[2]),
                Some(&mean),
                Some(&var),
                true,
                0.1,
                1e-5,
                false,
            )
        }),
        ("gelu", |w, x| x.matmul(&w[0]).gelu("tanh")),
        ("in-place relu", |w, x| x.matmul(&w[0]).relu_()),
        ("convolution", |w, x| {
            x.matmul(&w[0]).view([1, 1, 12, 16]).conv2d(
                &w[0].view([1, 1, 16, 16]).i((.., .., ..3, ..3)),
                None::<Tensor>,
                [1, 1],
                [1, 1],
                [1, 1],
                1,
            )
        }),
        ("embedding", |w, x| {
            let index = x.abs().to_kind(Kind::Int64);
            Tensor::embedding(&w[0], &index, -1, false, false)
        }),
        ("index", |w, x| x.matmul(&w[0]).index_select(0, &Tensor::from_slice(&[3i64, 1, 1]))),
        ("view", |w, x| x.matmul(&w[0]).tanh().tr()),
        ("cross-entropy", |w, x| {
            let target = Tensor::arange(12, (Kind::Int64, Device::Cpu));
            x.matmul(&w[0]).cross_entropy_loss::<Tensor>(&target, None, tch::Reduction::Mean, -100, 0.1)
        }),
        ("linear", |w, x| x.matmul(&w[0]).tanh().linear(&w[0], Some(&w[1]))),
        ("product with a mask of its own", |w, x| {
            let y = x.matmul(&w[0]);
            let mask = y.gt(0.0).to_kind(Kind::Float);
            y.tanh() * mask
        }),
        ("sort", |w, x| x.matmul(&w[0]).sort(-1, true).0),
        ("silu", |w, x| x.matmul(&w[0]).silu()),
        ("group norm", |w, x| {
            x.matmul(&w[0]).view([12, 4, 4]).group_norm(
                2,
                Some(&w[1].i(..4)),
                Some(&w[2].i(..4)),
                1e-5,
                false,
            )
        }),
        ("cumulative product", |w, x| x.matmul(&w[0]).cumprod(1, Kind::Float)),
        ("instance norm", |w, x| {
            x.matmul(&w[0])
                .view([2, 6, 16])
                .instance_norm::<Tensor>(None, None, None, None, true, 0.1, 1e-5, false)
        }),
    ];
    for (what, body) in endings {
        let weights = vec![leaf(&[16, 16]), leaf(&[16]), leaf(&[16])];
        assert_same(what, &leaf(&[12, 16]), weights, *body);
    }
}

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

/// Case 26.
#[test]
fn several_optional_and_detached_tensors_keep_their_flags() {
    let _guard = serial();
    let shared = Shared::new(leaf(&[4, 4]));
    let x = leaf(&[2, 4]);
    let (y, z, gone) = checkpoint(&shared, &(x.shallow_clone(), None::<Tensor>), |w, (x, bias)| {
        let y = x.matmul(w).tanh();
        let y = bias.as_ref().map_or(y.shallow_clone(), |bias| &y + bias);
        let detached = y.detach();
        (y, Some(detached), None::<Tensor>)
    })
    .unwrap();
    assert!(y.requires_grad() && !z.as_ref().unwrap().requires_grad() && gone.is_none());
    (y * z.unwrap()).sum(Kind::Float).backward();
    let got = x.grad().copy();
    let x2 = x.detach().copy().set_requires_grad(true);
    shared
        .with(|w| {
            let y = x2.matmul(w).tanh();
            (&y * y.detach()).sum(Kind::Float).backward();
        })
        .unwrap();
    assert_eq!(x2.grad(), got);
}

/// Case 28.
#[test]
fn eight_layers_hold_their_inputs_and_nothing_after_backward() {
    let _guard = serial();
    let layers: Vec<_> = (0..8)
        .map(|_| {
            ActivationCheckpoint::new(Block {
                weights: vec![leaf(&[64, 256]), leaf(&[256, 64])],
                body: |w, x| x.matmul(&w[0]).gelu("none").matmul(&w[1]),
            })
        })
        .collect();
    let x = leaf(&[128, 64]);
    let forward = || layers.iter().fold(x.shallow_clone(), |x, layer| layer.forward(&x));
    forward().sum(Kind::Float).backward();

    let before = live();
    let y = forward();
    let activation = 128 * 64 * 4;
    // Seven hidden inputs and the output; the first input is the caller's.
    assert_eq!(live() - before, 8 * activation);
    y.sum(Kind::Float).backward();
    drop(y);
    assert_eq!(live(), before);

    let y = forward();
    drop(y);
    assert_eq!(live(), before);
}

/// Case 28.
#[test]
fn fifty_steps_half_of_them_dropped_stay_flat() {
    let _guard = serial();
    let block = ActivationCheckpoint::new(Block {
        weights: vec![leaf(&[32, 32])],
        body: |w, x| x.matmul(&w[0]).dropout(0.1, true).tanh(),
    });
    let x = leaf(&[16, 32]);
    let mut after = Vec::new();
    for step in 0..50 {
        let loss = block.forward(&block.forward(&x)).sum(Kind::Float);
        if step % 2 == 0 {
            loss.backward();
        }
        drop(loss);
        after.push(live());
    }
    assert!(after[2..].iter().all(|bytes| *bytes == after[2]), "{after:?}");
}

/// Case 27.
#[test]
fn a_recompute_stops_before_the_last_matmul() {
    let _guard = serial();
    use std::sync::atomic::{AtomicUsize, Ordering};
    static REACHED: AtomicUsize = AtomicUsize::new(0);
    for (early_stop, reached) in [(EarlyStop::On, 1), (EarlyStop::Off, 2)] {
        REACHED.store(0, Ordering::Relaxed);
        let block = ActivationCheckpoint::new(Block {
            weights: vec![leaf(&[8, 8]), leaf(&[8, 8])],
            body: |w, x| {
                let y = x.matmul(&w[0]).tanh().matmul(&w[1]);
                REACHED.fetch_add(1, Ordering::Relaxed);
                y
            },
        })
        .early_stop(early_stop);
        block.forward(&leaf(&[4, 8])).sum(Kind::Float).backward();
        assert_eq!(REACHED.load(Ordering::Relaxed), reached);
        assert_eq!(block.recomputes(), 1);
    }
}

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

/// Case 31.
#[test]
fn nested_and_repeated_segments_give_the_same_bits() {
    let _guard = serial();
    let body: fn(&[Tensor], &Tensor) -> Tensor =
        |w, x| x.matmul(&w[0]).dropout(0.2, true).tanh().matmul(&w[0]).sin();
    let weights: Vec<_> = (0..4).map(|_| leaf(&[8, 8])).collect();
    let plain = |w: &Tensor| Block { weights: vec![w.shallow_clone()], body };
    let x = leaf(&[6, 8]);
    let right = pass(
        &|x| {
            let first = weights.iter().fold(x.shallow_clone(), |x, w| plain(w).forward(&x));
            weights.iter().fold(first, |x, w| plain(w).forward(&x))
        },
        &x,
        &weights,
    );
    let inner = |w: &Tensor| ActivationCheckpoint::new(plain(w)).checked();
    let pair =
        |a: &Tensor, b: &Tensor| ActivationCheckpoint::new(nn::seq().add(inner(a)).add(inner(b))).checked();
    let outer = ActivationCheckpoint::new(
        nn::seq().add(pair(&weights[0], &weights[1])).add(pair(&weights[2], &weights[3])),
    )
    .checked();
    let got = pass(&|x| outer.forward(&outer.forward(x)), &x, &weights);
    assert!(same(&got, &right));
    assert_eq!(outer.recomputes(), 2);
}

/// Case 31.
#[test]
fn a_kept_graph_and_a_partial_backward_recompute_again() {
    let _guard = serial();
    let weights = vec![leaf(&[8, 8]), leaf(&[8, 8])];
    let body: fn(&[Tensor], &Tensor) -> Tensor = |w, x| x.matmul(&w[0]).tanh().matmul(&w[1]).sin();
    let run = |wrapped: bool| {
        let x = Tensor::ones([3, 8], FLOAT).set_requires_grad(true);
        let block = Block { weights: clones(&weights), body };
        let wrapper = ActivationCheckpoint::new(Block { weights: clones(&weights), body });
        let y = if wrapped { wrapper.forward(&x) } else { block.forward(&x) }.sum(Kind::Float);
        let before = live();
        let mut all = Tensor::run_backward(&[&y], &[&weights[1]], true, false);
        if wrapped {
            let leftover = live() - before;
            assert_eq!(leftover, 8 * 8 * 4, "only the gradient is left of a partial backward");
        }
        all.extend(Tensor::run_backward(&[&y], &[&x, &weights[0]], true, false));
        all.extend(Tensor::run_backward(&[&y], &[&x, &weights[0]], false, false));
        if wrapped {
            assert_eq!(wrapper.recomputes(), 3);
        }
        all
    };
    assert!(same(&run(true), &run(false)));
}

/// Case 31.
#[test]
fn a_gradient_penalty_passes_through_a_segment() {
    let _guard = serial();
    let weights = vec![leaf(&[8, 8])];
    let body: fn(&[Tensor], &Tensor) -> Tensor = |w, x| x.matmul(&w[0]).tanh().matmul(&w[0]).sin();
    let run = |wrapped: bool| {
        let x = Tensor::ones([3, 8], FLOAT).set_requires_grad(true);
        let mut w = weights[0].shallow_clone();
        let block = Block { weights: clones(&weights), body };
        let wrapper = ActivationCheckpoint::new(Block { weights: clones(&weights), body }).checked();
        let y = if wrapped { wrapper.forward(&x) } else { block.forward(&x) }.sum(Kind::Float);
        let first = Tensor::run_backward(&[&y], &[&x], true, true);
        (y + first[0].square().sum(Kind::Float)).backward();
        let all = vec![x.grad().copy(), w.grad().copy()];
        w.zero_grad();
        all
    };
    assert!(same(&run(true), &run(false)));
}

/// Case 31: backward inside the segment itself.
#[test]
fn a_gradient_taken_inside_a_segment_is_that_of_the_plain_run() {
    let _guard = serial();
    let weights = vec![leaf(&[8, 8])];
    assert_same("inner gradient", &leaf(&[3, 8]), weights, |w, x| {
        let energy = x.matmul(&w[0]).tanh().sum(Kind::Float);
        let force = Tensor::run_backward(&[&energy], &[x], true, true);
        (x + &force[0]).sin()
    });
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
fn without_gradients_a_segment_costs_nothing() {
    let _guard = serial();
    let block = ActivationCheckpoint::new(Block {
        weights: vec![leaf(&[4, 4])],
        body: |w, x| x.matmul(&w[0]).tanh(),
    });
    let x = leaf(&[2, 4]);
    let before = live();
    let y = tch::no_grad(|| block.forward(&x));
    assert!(!y.requires_grad());
    drop(y);
    assert_eq!((live(), block.recomputes()), (before, 0));
    let inner = block.into_inner().unwrap();
    assert_eq!(inner.weights.len(), 1);
}

#[test]
fn a_module_comes_back_when_no_graph_needs_it() {
    let _guard = serial();
    let block = ActivationCheckpoint::new(Block {
        weights: vec![leaf(&[4, 4])],
        body: |w, x| x.matmul(&w[0]).tanh(),
    });
    let y = block.forward(&leaf(&[2, 4]));
    let block = block.into_inner().unwrap_err();
    assert_eq!(block.with(|block| block.weights.len()).unwrap(), 1);
    drop(y);
    assert!(block.into_inner().is_ok());
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
    let error = memfit::rng::Generators::capture(Device::Mps).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
}

#[test]
fn backward_may_run_on_another_thread_than_forward() {
    let _guard = serial();
    let run = |wrapped: bool| {
        tch::manual_seed(2);
        let weights = vec![leaf(&[8, 8])];
        let body: fn(&[Tensor], &Tensor) -> Tensor = |w, x| x.matmul(&w[0]).dropout(0.5, true).tanh();
        let x = leaf(&[4, 8]);
        let block = Block { weights: clones(&weights), body };
        let y = if wrapped { ActivationCheckpoint::new(block).forward(&x) } else { block.forward(&x) };
        std::thread::spawn(move || y.sum(Kind::Float).backward()).join().unwrap();
        vec![x.grad().copy(), weights[0].grad().copy()]
    };
    assert!(same(&run(true), &run(false)));
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

#[test]
fn the_peak_falls_with_checkpoints() {
    let _guard = serial();
    let run = |wrapped: bool| {
        let blocks: Vec<_> = (0..8)
            .map(|_| Block {
                weights: vec![leaf(&[64, 256]), leaf(&[256, 64])],
                body: |w, x| x.matmul(&w[0]).gelu("none").matmul(&w[1]),
            })
            .collect();
        let blocks: Vec<Box<dyn Module>> = blocks
            .into_iter()
            .map(|block| -> Box<dyn Module> {
                if wrapped { Box::new(ActivationCheckpoint::new(block)) } else { Box::new(block) }
            })
            .collect();
        let x = leaf(&[128, 64]);
        let step = || {
            blocks.iter().fold(x.shallow_clone(), |x, block| block.forward(&x)).sum(Kind::Float).backward()
        };
        step();
        let before = live();
        let ((), peak) = memory::peak_of(Device::Cpu, step).unwrap();
        peak - before
    };
    let (plain, wrapped) = (run(false), run(true));
    assert!(wrapped * 3 < plain, "{wrapped} of {plain}");
}
