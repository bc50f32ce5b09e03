//! What recomputing costs: twelve blocks, all kept or all checkpointed.

mod support;

use criterion::{Criterion, criterion_group, criterion_main};
use memfit::ActivationCheckpoint;
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};

const BLOCKS: usize = 12;

enum Activations {
    Kept,
    Recomputed,
}

fn model(vs: &nn::Path, width: i64, activations: &Activations) -> nn::Sequential {
    (0..BLOCKS).fold(nn::seq(), |model, index| {
        let block = nn::seq()
            .add(nn::linear(vs / index / "up", width, 4 * width, Default::default()))
            .add_fn(|xs| xs.gelu("tanh"))
            .add(nn::linear(vs / index / "down", 4 * width, width, Default::default()));
        match activations {
            Activations::Kept => model.add(block),
            Activations::Recomputed => model.add(ActivationCheckpoint::new(block)),
        }
    })
}

fn bench(criterion: &mut Criterion) {
    let (rows, width) = if support::measures() { (512, 256) } else { (16, 16) };
    let vs = nn::VarStore::new(Device::Cpu);
    let input = Tensor::randn([rows, width], (Kind::Float, Device::Cpu));
    let kept = model(&(vs.root() / "kept"), width, &Activations::Kept);
    let recomputed = model(&(vs.root() / "recomputed"), width, &Activations::Recomputed);
    let mut plain = || kept.forward(&input).mean(Kind::Float).backward();
    let mut checkpointed = || recomputed.forward(&input).mean(Kind::Float).backward();

    support::print_peak("plain loop", &mut plain);
    support::print_peak("checkpoint every block", &mut checkpointed);
    if support::measures() {
        let (ours, theirs) = support::in_turns(9, 3, &mut checkpointed, &mut plain);
        println!("recomputing every block takes {:.3} of the plain loop's time", ours / theirs);
    }
    let mut group = criterion.benchmark_group("forward and backward");
    group.sample_size(10);
    group.bench_function("plain loop", |bencher| bencher.iter(&mut plain));
    group.bench_function("checkpoint every block", |bencher| bencher.iter(&mut checkpointed));
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
