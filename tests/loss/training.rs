//! In windows, under autocast, offload and checkpointing.

use super::*;

/// A two-layer model whose loss is fused or plain.
struct Model {
    vs: nn::VarStore,
    up: nn::Linear,
    head: nn::Linear,
}

impl Model {
    fn new() -> Self {
        memfit::tch::manual_seed(3);
        let vs = nn::VarStore::new(Device::Cpu);
        let up = nn::linear(vs.root() / "up", 6, 16, Default::default());
        let head = nn::linear(vs.root() / "head", 16, 40, Default::default());
        Self { vs, up, head }
    }

    fn loss(&self, fused: bool, x: &Tensor, targets: &Tensor) -> Loss {
        let hidden = x.apply(&self.up).tanh();
        if fused {
            let loss = LinearCrossEntropy::new(Config::default().chunk_bytes(700)).unwrap();
            let inputs = Inputs::new(&hidden, &self.head.ws, targets);
            let inputs = match &self.head.bs {
                Some(bias) => inputs.bias(bias),
                None => inputs,
            };
            return loss.loss(&inputs).unwrap().into_loss();
        }
        let logits = hidden.apply(&self.head).to_kind(Kind::Float);
        let n = targets.ne(IGNORED).sum(Kind::Int64).int64_value(&[]);
        Loss::mean(logits.cross_entropy_for_logits(targets), n)
    }
}

fn batches() -> Vec<(Tensor, Tensor)> {
    memfit::tch::manual_seed(11);
    (0..6)
        .map(|index| {
            let rows = 10 + 3 * index;
            let x = Tensor::randn([rows, 6], (Kind::Float, Device::Cpu));
            let targets = Tensor::randint(40, [rows], (Kind::Int64, Device::Cpu));
            let _ = targets.narrow(0, 0, index).fill_(IGNORED);
            (x, targets)
        })
        .collect()
}

/// Trains six micro-batches in windows of three.
fn train(fused: bool, bf16: bool, offload: bool) -> Vec<Tensor> {
    let model = Model::new();
    let mut stack = Stack::of(&model.vs, sgd(&model.vs)).with(GradAccumulator::every(3));
    if bf16 {
        stack = stack.with(AmpScaler::bf16());
    }
    if offload {
        stack = stack.with(CpuOffload::activations().disk(std::env::temp_dir()).min_bytes(0));
    }
    let mut training = stack.build().unwrap();
    for (x, targets) in batches() {
        let _ = training.step_with(|| Ok(model.loss(fused, &x, &targets))).unwrap();
    }
    support::copies(&model.vs.trainable_variables())
}

#[test]
fn under_windows_autocast_and_offload_it_trains_as_the_plain_loss() {
    let _guard = serial();
    for (bf16, offload, tolerance) in
        [(false, false, 2e-6), (false, true, 2e-6), (true, false, 1e-2), (true, true, 1e-2)]
    {
        let (fused, plain) = (train(true, bf16, offload), train(false, bf16, offload));
        for (fused, plain) in fused.iter().zip(&plain) {
            let error = difference(fused, plain);
            assert!(error < tolerance, "bf16 {bf16} offload {offload}: {error}");
        }
        assert!(support::same(&fused, &train(true, bf16, false)), "offload changes bits");
    }
}

#[test]
fn in_a_checkpointed_segment_it_is_bit_equal() {
    let _guard = serial();
    let p = Problem::new(50, 8, 30, Kind::Float);
    let with = With::default();
    let plain = gradients(&p, &with.fused(&p, 1000).loss, with);
    let shared = Shared::new((p.weight.shallow_clone(), p.targets.shallow_clone()));
    let before = live();
    let out = memfit::checkpoint(&shared, &p.hidden, |(weight, targets), xs: &Tensor| {
        let loss = LinearCrossEntropy::new(Config::default().chunk_bytes(1000)).unwrap();
        loss.loss(&Inputs::new(&xs.tanh(), weight, targets)).unwrap().loss
    })
    .unwrap();
    assert!(live() - before < 4 * 50 * 8, "the segment keeps no gradient");
    drop(out);
    let out = memfit::checkpoint(&shared, &p.hidden, |(weight, targets), xs: &Tensor| {
        let loss = LinearCrossEntropy::new(Config::default().chunk_bytes(1000)).unwrap();
        loss.loss(&Inputs::new(xs, weight, targets)).unwrap().loss
    })
    .unwrap();
    assert!(support::same(&gradients(&p, &out, with), &plain));
}
