//! What the fused linear layer and cross-entropy costs, and saves: against the plain form at a
//! vocabulary of 32,000.

mod support;

use criterion::{Criterion, criterion_group, criterion_main};
use memfit::loss::{Inputs, LinearCrossEntropy, LinearCrossEntropyConfig};
use memfit::strategies::autocast;
use memfit::tch::{Device, Kind, Tensor};

struct Head {
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
}

impl Head {
    fn new(tokens: i64, width: i64, classes: i64) -> Self {
        let cpu = (Kind::Float, Device::Cpu);
        Self {
            hidden: Tensor::randn([tokens, width], cpu).set_requires_grad(true),
            weight: (Tensor::randn([classes, width], cpu) * 0.05).set_requires_grad(true),
            targets: Tensor::randint(classes, [tokens], (Kind::Int64, Device::Cpu)),
        }
    }

    fn backward(&self, loss: &Tensor) {
        drop(Tensor::run_backward(&[loss], &[&self.hidden, &self.weight], false, false));
    }

    fn plain(&self) {
        let logits = self.hidden.linear(&self.weight, None::<&Tensor>);
        let loss = logits.to_kind(Kind::Float).cross_entropy_for_logits(&self.targets);
        drop(logits);
        self.backward(&loss);
    }

    fn fused(&self, chunk_bytes: u64) -> memfit::Result<()> {
        let config = LinearCrossEntropyConfig::default().chunk_bytes(chunk_bytes);
        let inputs = Inputs::new(&self.hidden, &self.weight, &self.targets);
        self.backward(&LinearCrossEntropy::new(config)?.loss(&inputs)?.loss);
        Ok(())
    }
}

fn run(result: memfit::Result<()>) {
    if let Err(error) = result {
        panic!("{error}");
    }
}

fn compare(head: &Head, dtype: Option<Kind>, chunk_mib: u64) {
    let name = dtype.map_or("fp32".to_owned(), |kind| format!("{kind:?} autocast"));
    let both = |body: &dyn Fn() -> memfit::Result<()>| match dtype {
        Some(kind) => run(autocast(Device::Cpu, kind, body)),
        None => run(body()),
    };
    let plain = || {
        both(&|| {
            head.plain();
            Ok(())
        })
    };
    let fused = || both(&|| head.fused(chunk_mib << 20));
    support::print_peak(&format!("{name}, plain form"), plain);
    support::print_peak(&format!("{name}, fused, chunks of {chunk_mib} MiB"), fused);
    if support::measures() {
        let (ours, theirs) = support::in_turns(7, 1, fused, plain);
        println!("{name}, chunks of {chunk_mib} MiB: {:.3} of the plain form's {theirs:.3} s", ours / theirs);
    }
}

fn bench(criterion: &mut Criterion) {
    let (tokens, width, classes) = if support::measures() { (2048, 256, 32_000) } else { (32, 16, 500) };
    let head = Head::new(tokens, width, classes);
    for dtype in [None, Some(Kind::BFloat16)] {
        for chunk_mib in [4, 16, 64] {
            compare(&head, dtype, chunk_mib);
        }
    }
    let mut group = criterion.benchmark_group("linear layer and cross-entropy");
    group.sample_size(10);
    group.bench_function("plain form", |bencher| bencher.iter(|| head.plain()));
    group.bench_function("fused", |bencher| bencher.iter(|| run(head.fused(16 << 20))));
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
