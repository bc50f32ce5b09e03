//! How fast activations leave for a disk and return, and what that costs a step.

mod support;

use criterion::{Criterion, criterion_group, criterion_main};
use memfit::CpuOffload;
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};

fn bench(criterion: &mut Criterion) {
    let (rows, width) = if support::measures() { (2048, 256) } else { (256, 256) };
    let vs = nn::VarStore::new(Device::Cpu);
    let model = (0..8).fold(nn::seq(), |model, index| {
        let linear = nn::linear(vs.root() / index, width, width, Default::default());
        model.add(linear).add_fn(|xs| xs.gelu("tanh"))
    });
    let input = Tensor::randn([rows, width], (Kind::Float, Device::Cpu));
    let mut offload = CpuOffload::activations().disk(std::env::temp_dir());
    let observer = offload.observer();
    let loss = || model.forward(&input).mean(Kind::Float);
    let mut plain = || loss().backward();
    let mut offloaded = || {
        let loss = offload.around(Device::Cpu, &[], || Ok(loss())).expect("a folder to write to");
        loss.backward();
    };

    support::print_peak("plain loop", &mut plain);
    support::print_peak("activations on disk", &mut offloaded);
    if support::measures() {
        let before = observer.moved();
        let (ours, theirs) = support::in_turns(9, 3, &mut offloaded, &mut plain);
        let after = observer.moved();
        let bytes = after.out_bytes - before.out_bytes + after.in_bytes - before.in_bytes;
        let rate = bytes as f64 / 27.0 / (ours - theirs) / 1e9;
        println!("activations on disk take {:.3} of the plain loop's time", ours / theirs);
        println!("what that adds carries {rate:.2} GB/s, out and in together");
    }
    let mut group = criterion.benchmark_group("forward and backward");
    group.sample_size(10);
    group.bench_function("plain loop", |bencher| bencher.iter(&mut plain));
    group.bench_function("activations on disk", |bencher| bencher.iter(&mut offloaded));
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
