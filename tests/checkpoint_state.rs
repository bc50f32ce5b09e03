//! State that a segment reads, changes or makes: right gradients, or an error.

mod support;

use memfit::checkpoint::{Shared, checkpoint};
use memfit::offload::CpuOffload;
use memfit::optim::{AdamW, AdamWConfig, Optimizer, Sgd, SgdConfig};
use memfit::saved::register;
use memfit::tch::{self, Device, Kind, Tensor};
use memfit::{Error, Named, Update};
use support::{copies, same, serial};

#[test]
fn integer_scalars_made_inside_a_segment_keep_their_values() {
    let _guard = serial();
    let x = Tensor::randn([4, 6], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let w = Tensor::randn([6, 6], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let bodies: [fn(&Tensor, &Tensor) -> Tensor; 4] = [
        |x, w| (x.matmul(w) / x.gt(9.0).sum(Kind::Int64).clamp_min_(1)).tanh(),
        |x, w| (x.matmul(w) * Tensor::full([], 3, (Kind::Int64, Device::Cpu))).tanh(),
        |x, w| {
            let mut n = Tensor::zeros([], (Kind::Int64, Device::Cpu));
            n += 1;
            n += 1;
            (x.matmul(w) * n).tanh()
        },
        |x, w| (x.matmul(w) * x.abs().sum(Kind::Float).to_kind(Kind::Int64)).tanh(),
    ];
    for (index, body) in bodies.into_iter().enumerate() {
        let gradients = |y: Tensor| {
            let grads = Tensor::run_backward(&[y.square().sum(Kind::Float)], &[&x, &w], false, false);
            copies(&grads)
        };
        let plain = gradients(body(&x, &w));
        let shared = Shared::new(w.shallow_clone());
        let inputs = x.shallow_clone();
        let y = checkpoint(&shared, &inputs, move |w, x| body(x, w)).unwrap();
        assert!(same(&plain, &gradients(y)), "{index}");
    }
}

#[test]
fn a_registered_buffer_read_and_then_changed_in_a_segment_is_an_error_not_another_gradient() {
    let _guard = serial();
    let average = Tensor::zeros([6], (Kind::Float, Device::Cpu));
    let _known = register(&[Named::new("average", &average)]).unwrap();
    let x = Tensor::randn([4, 6], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let shared = Shared::new(average.shallow_clone());
    let y = checkpoint(&shared, &x.shallow_clone(), |average, x| {
        let y = (x + average).tanh();
        tch::no_grad(|| drop(average.shallow_clone().lerp_(&x.mean_dim(0, false, Kind::Float), 0.1)));
        y.square()
    });
    let error = Error::from(y.unwrap().sum(Kind::Float).f_backward().unwrap_err());
    assert!(matches!(&error, Error::Modified { what, .. } if what.contains("average")), "{error}");
}

#[test]
fn a_frozen_tensor_in_a_list_is_watched() {
    let _guard = serial();
    let mut class = Tensor::zeros([1, 6], (Kind::Float, Device::Cpu));
    let _known = register(&[Named::new("class", &class)]).unwrap();
    let x = Tensor::randn([4, 6], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let shared = Shared::new(class.shallow_clone());
    let y = checkpoint(&shared, &x.shallow_clone(), |class, x| Tensor::cat(&[class, x], 0).tanh().square());
    let y = y.unwrap();
    let _ = class.fill_(1.0);
    let error = Error::from(y.sum(Kind::Float).f_backward().unwrap_err());
    assert!(matches!(error, Error::Modified { .. }), "{error}");
}

#[test]
fn a_parameter_that_its_segment_changes_is_an_error() {
    let _guard = serial();
    let x = Tensor::randn([4, 6], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    // The change comes before the last saved tensor, or after it: then the recompute ends first.
    let bodies: [fn(Tensor) -> Tensor; 2] = [|y| y.square(), |y| y];
    for (index, last) in bodies.into_iter().enumerate() {
        let w = Tensor::randn([6, 6], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let shared = Shared::new(w.shallow_clone());
        let y = checkpoint(&shared, &x.shallow_clone(), move |w, x| {
            let y = x.matmul(w).tanh();
            tch::no_grad(|| drop(w.shallow_clone().g_mul_scalar_(0.99)));
            last(y)
        });
        let backward = y.unwrap().sum(Kind::Float).f_backward();
        assert!(matches!(backward.map_err(Error::from), Err(Error::Modified { .. })), "{index}");
    }
}

/// Case 29: for every optimizer of the crate, with checkpoint, and with offload around it.
#[test]
fn an_update_between_forward_and_backward_is_an_error() {
    let _guard = serial();
    type Make = fn(&Vec<Tensor>) -> Box<dyn Optimizer>;
    let makes: [Make; 4] = [
        |w| Box::new(Sgd::new(w, SgdConfig::default().lr(0.1)).unwrap()),
        |w| Box::new(Sgd::new(w, SgdConfig::default().lr(0.1).momentum(0.9)).unwrap()),
        |w| Box::new(AdamW::new(w, AdamWConfig::default()).unwrap()),
        |w| Box::new(AdamW::adam(w, AdamWConfig::default()).unwrap()),
    ];
    for make in makes {
        for offloaded in [false, true] {
            let x = Tensor::randn([64, 64], (Kind::Float, Device::Cpu));
            let w = Tensor::randn([64, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
            let mut optimizer = make(&vec![w.shallow_clone()]);
            x.matmul(&w).square().mean(Kind::Float).backward();
            let forward = || {
                let shared = Shared::new(w.shallow_clone());
                checkpoint(&shared, &x.shallow_clone(), |w, x| x.matmul(w).tanh().square())
            };
            let mut offload = CpuOffload::activations().disk(std::env::temp_dir()).min_bytes(0);
            let y = if offloaded { offload.around(Device::Cpu, &[], forward) } else { forward() };
            optimizer.step(&Update::plain()).unwrap();
            let error = Error::from(y.unwrap().sum(Kind::Float).f_backward().unwrap_err());
            assert!(matches!(error, Error::Modified { .. }), "{} {offloaded}: {error}", optimizer.name());
        }
    }
}

/// Case 29: a segment's input that was moved is what forward saw; one that stayed is an error.
#[test]
fn a_changed_input_is_the_old_value_or_an_error_under_checkpoint_and_offload() {
    let _guard = serial();
    for moved in [false, true] {
        let w = Tensor::randn([64, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let mut x = Tensor::randn([64, 64], (Kind::Float, Device::Cpu));
        let plain = Tensor::run_backward(&[x.matmul(&w).tanh().sum(Kind::Float)], &[&w], false, false);
        let shared = Shared::new(w.shallow_clone());
        let least = if moved { 0 } else { 1 << 20 };
        let mut offload = CpuOffload::activations().disk(std::env::temp_dir()).min_bytes(least);
        let y = offload
            .around(Device::Cpu, &[], || checkpoint(&shared, &x.shallow_clone(), |w, x| x.matmul(w).tanh()));
        let _ = x.fill_(3.0);
        let backward = Tensor::f_run_backward(&[y.unwrap().sum(Kind::Float)], &[&w], false, false);
        match backward {
            Ok(grads) => assert!(moved && same(&grads, &plain)),
            Err(error) => assert!(!moved && matches!(Error::from(error), Error::Modified { .. })),
        }
        assert_eq!(offload.moved().out_bytes > 0, moved);
    }
}
