//! What a stack without strategies adds to a step of the loop written by hand (at most 5 µs).

mod support;

use criterion::{Criterion, criterion_group, criterion_main};
use memfit::optim::{Optimizer, Sgd, SgdConfig};
use memfit::tch::{Device, Kind, Tensor, nn};
use memfit::{Loss, Stack, Update};

struct Model {
    weight: Tensor,
    input: Tensor,
}

impl Model {
    fn new(vs: &nn::VarStore) -> Self {
        let weight = vs.root().zeros("weight", &[16, 16]);
        Self { weight, input: Tensor::ones([16, 16], (Kind::Float, Device::Cpu)) }
    }

    fn loss(&self) -> Tensor {
        self.input.mm(&self.weight).mean(Kind::Float)
    }
}

fn bench(criterion: &mut Criterion) {
    let config = SgdConfig::default().lr(1e-3);
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Model::new(&vs);
    let mut optimizer = Sgd::new(&vs, config).expect("an optimizer");
    let mut plain = || {
        model.loss().backward();
        optimizer.step(&Update::plain()).expect("a step");
        optimizer.zero_grad();
    };

    let stacked_vs = nn::VarStore::new(Device::Cpu);
    let stacked_model = Model::new(&stacked_vs);
    let optimizer = Sgd::new(&stacked_vs, config).expect("an optimizer");
    let mut training = Stack::of(&stacked_vs, optimizer).build().expect("a stack");
    let mut stacked = || {
        let outcome = training.step_with(|| Ok(Loss::of(stacked_model.loss()))).expect("a step");
        assert!(outcome.stepped());
    };

    support::print_peak("plain loop", &mut plain);
    support::print_peak("empty stack", &mut stacked);
    if support::measures() {
        let (ours, theirs) = support::in_turns(21, 2_000, &mut stacked, &mut plain);
        println!("an empty stack adds {:.2} µs to a step", (ours - theirs) * 1e6);
    }
    let mut group = criterion.benchmark_group("step");
    group.bench_function("plain loop", |bencher| bencher.iter(&mut plain));
    group.bench_function("empty stack", |bencher| bencher.iter(&mut stacked));
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
