//! Gradients and generators as in the plain run.

use super::*;

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
