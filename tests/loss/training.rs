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

/// What stands around the loss.
#[derive(Clone, Copy, Debug, Default)]
struct Around {
    autocast: Option<Kind>,
    offload: bool,
    /// The layer before it in a checkpointed segment, and the loss itself.
    hidden: bool,
    segment: bool,
}

const DTYPES: [(Option<Kind>, f64); 3] =
    [(None, 2e-6), (Some(Kind::BFloat16), 1e-2), (Some(Kind::Half), 2e-3)];

fn scaler(dtype: Kind) -> AmpScaler {
    match dtype {
        Kind::Half => AmpScaler::fp16_with(|config| config.init_scale = 1024.0).unwrap(),
        _ => AmpScaler::bf16(),
    }
}

impl Model {
    /// The fused loss, in segments as asked for.
    fn loss_in(&self, around: Around, x: &Tensor, targets: &Tensor) -> memfit::Result<Loss> {
        if !around.hidden && !around.segment {
            return Ok(self.loss(true, x, targets));
        }
        let shared = |layer: &nn::Linear| {
            let bias = layer.bs.as_ref().map(Tensor::shallow_clone);
            (layer.ws.shallow_clone(), bias)
        };
        let up = Shared::new(shared(&self.up));
        let hidden = match around.hidden {
            true => memfit::checkpoint(&up, x, |(ws, bs), x: &Tensor| x.linear(ws, bs.as_ref()).tanh())?,
            false => x.apply(&self.up).tanh(),
        };
        let n = targets.ne(IGNORED).sum(Kind::Int64).int64_value(&[]);
        let head = Shared::new((shared(&self.head), targets.shallow_clone()));
        let fused = |((ws, bs), targets): &((Tensor, Option<Tensor>), Tensor), hidden: &Tensor| {
            let loss = LinearCrossEntropy::new(Config::default().chunk_bytes(700)).unwrap();
            let inputs = Inputs::new(hidden, ws, targets);
            let inputs = bs.as_ref().map_or(inputs, |bias| inputs.bias(bias));
            loss.loss(&inputs).unwrap().loss
        };
        let loss = match around.segment {
            true => memfit::checkpoint(&head, &hidden, fused)?,
            false => head.with(|head| fused(head, &hidden))?,
        };
        Ok(Loss::mean(loss, n))
    }
}

/// Trains six micro-batches in windows of three.
fn train(fused: bool, around: Around) -> Vec<Tensor> {
    let model = Model::new();
    let mut stack = Stack::of(&model.vs, sgd(&model.vs)).with(GradAccumulator::every(3));
    if let Some(dtype) = around.autocast {
        stack = stack.with(scaler(dtype));
    }
    if around.offload {
        stack = stack.with(CpuOffload::activations().disk(std::env::temp_dir()).min_bytes(0));
    }
    let mut training = stack.build().unwrap();
    for (x, targets) in batches() {
        let _ = training
            .step_with(|| {
                if fused { model.loss_in(around, &x, &targets) } else { Ok(model.loss(false, &x, &targets)) }
            })
            .unwrap();
    }
    assert_eq!(training.position().steps, 2);
    support::copies(&model.vs.trainable_variables())
}

#[test]
fn under_windows_autocast_offload_and_checkpointing_it_trains_as_the_plain_loss() {
    let _guard = serial();
    for (autocast, tolerance) in DTYPES {
        let alone = Around { autocast, ..Default::default() };
        let (fused, plain) = (train(true, alone), train(false, alone));
        for (fused, plain) in fused.iter().zip(&plain) {
            let error = difference(fused, plain);
            assert!(error < tolerance, "{autocast:?}: {error}");
        }
        for bits in 1..8 {
            let on = |bit: i32| bits & bit != 0;
            let around = Around { offload: on(1), hidden: on(2), segment: on(4), ..alone };
            assert!(support::same(&fused, &train(true, around)), "{around:?} changes bits");
        }
    }
}

/// A batch of 40 rows of which 7 fit at once, so micro-batches of 5, one of them of ignored labels
/// only, against the plain loss of the whole batch.
#[test]
fn in_a_split_batch_it_trains_as_the_plain_loss_of_the_whole() {
    let _guard = serial();
    for (autocast, tolerance) in DTYPES {
        let run = |fused: bool| {
            let model = Model::new();
            let mut stack = Stack::of(&model.vs, sgd(&model.vs)).with(MicroBatcher::new());
            if let Some(dtype) = autocast {
                stack = stack.with(scaler(dtype));
            }
            let mut training = stack.build().unwrap();
            memfit::tch::manual_seed(12);
            let x = Tensor::randn([40, 6], (Kind::Float, Device::Cpu));
            let targets = Tensor::randint(40, [40], (Kind::Int64, Device::Cpu));
            let _ = targets.narrow(0, 8, 7).fill_(IGNORED);
            let outcome = training.step_batch(&(x, targets), |(x, targets)| {
                if fused && x.size()[0] > 7 {
                    let device = Device::Cpu;
                    return Err(Error::OutOfMemory { requested: None, live: None, limit: None, device });
                }
                Ok(model.loss(fused, x, targets))
            });
            let split = outcome.unwrap().split().unwrap();
            assert_eq!(split.micro_batches, if fused { 8 } else { 1 });
            support::copies(&model.vs.trainable_variables())
        };
        for (fused, plain) in run(true).iter().zip(&run(false)) {
            let error = difference(fused, plain);
            assert!(error < tolerance, "{autocast:?}: {error}");
        }
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
