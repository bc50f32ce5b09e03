//! A training that draws random numbers, has buffers, a tied and a frozen weight, and windows.

#![allow(dead_code)]

use memfit::optim::{AdamW, AdamWConfig, Optimizer, Sgd, SgdConfig};
use memfit::strategies::{AmpScaler, Cosine, GradAccumulator, GradClip, MasterWeights};
use memfit::tch::{Device, Kind, Tensor, nn, nn::ModuleT};
use memfit::{CpuOffload, Loss, Result, Stack, State, StepOutcome, Value};

pub const WINDOW: usize = 3;

/// The model; `tied` is used twice and registered under two names.
#[derive(Debug)]
pub struct Net {
    first: nn::Linear,
    norm: nn::BatchNorm,
    tied: Tensor,
    last: nn::Linear,
}

impl Net {
    pub fn new(path: &nn::Path<'_>) -> Self {
        let first = nn::linear(path / "first", 4, 6, Default::default());
        let norm = nn::batch_norm1d(path / "norm", 6, Default::default());
        let tied = path.randn("tied", &[6, 6], 0.0, 0.5);
        let _ = path.add("tied_again", tied.shallow_clone(), true);
        let last = nn::linear(path / "last", 6, 1, Default::default());
        let _ = last.bs.as_ref().map(|bias| bias.set_requires_grad(false));
        Self { first, norm, tied, last }
    }

    pub fn loss(&self, x: &Tensor) -> Tensor {
        let x = x.apply(&self.first).relu().dropout(0.3, true);
        let x = self.norm.forward_t(&x.to_kind(Kind::Float), true).matmul(&self.tied).tanh();
        let x = x.dropout(0.2, true).matmul(&self.tied.tr()).apply(&self.last);
        x.to_kind(Kind::Float).square().mean(Kind::Float)
    }
}

/// The optimizers and stacks that the tests go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kit {
    Sgd,
    Momentum,
    Adam,
    AdamW,
    Scaled,
    Clipped,
    OffDisk,
}

pub const KITS: [Kit; 7] =
    [Kit::Sgd, Kit::Momentum, Kit::Adam, Kit::AdamW, Kit::Scaled, Kit::Clipped, Kit::OffDisk];

pub struct Run {
    pub vs: nn::VarStore,
    pub net: Net,
    pub stack: Stack,
}

impl Run {
    pub fn new(kit: Kit, seed: i64) -> Self {
        memfit::tch::manual_seed(seed);
        let vs = nn::VarStore::new(Device::Cpu);
        let net = Net::new(&vs.root());
        let config = AdamWConfig::default().lr(0.01);
        let adamw = || AdamW::new(&vs, config).unwrap();
        let sgd = SgdConfig::default().lr(0.05);
        let stack = match kit {
            Kit::Sgd => Self::build(&vs, Sgd::new(&vs, sgd).unwrap(), kit),
            Kit::Momentum => Self::build(&vs, Sgd::new(&vs, sgd.momentum(0.9)).unwrap(), kit),
            Kit::Adam => Self::build(&vs, AdamW::adam(&vs, config).unwrap(), kit),
            Kit::AdamW | Kit::Scaled | Kit::Clipped => Self::build(&vs, adamw(), kit),
            Kit::OffDisk => {
                let offload = CpuOffload::optimizer(adamw()).disk(std::env::temp_dir()).unwrap();
                Self::build(&vs, offload, kit)
            }
        };
        Self { vs, net, stack }
    }

    fn build(vs: &nn::VarStore, optimizer: impl Optimizer + 'static, kit: Kit) -> Stack {
        let builder = Stack::of(vs, optimizer).with(GradAccumulator::every(WINDOW)).with(Cosine::new(40));
        let builder = if kit == Kit::Scaled {
            let scaler = AmpScaler::fp16_with(|config| {
                config.growth_interval = 2;
                config.init_scale = 1024.0;
            });
            builder.with(scaler.unwrap())
        } else {
            builder
        };
        let builder = if kit == Kit::Clipped { builder.with(GradClip::norm(0.5)) } else { builder };
        builder.build().unwrap()
    }

    /// Micro-batches `from..to` of the data, each a function of its number.
    pub fn train(&mut self, from: u64, to: u64) -> Vec<StepOutcome> {
        (from..to).map(|number| self.micro(number).unwrap()).collect()
    }

    pub fn micro(&mut self, number: u64) -> Result<StepOutcome> {
        let x = batch(number);
        let net = &self.net;
        self.stack.step_with(|| Ok(Loss::mean(net.loss(&x), x.size()[0])))
    }

    pub fn weights(&self) -> Vec<(String, Tensor)> {
        let mut all: Vec<_> = self.vs.variables().into_iter().map(|(n, t)| (n, t.detach().copy())).collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }
}

/// Rows whose number varies, so that windows have weights.
pub fn batch(number: u64) -> Tensor {
    let rows = 3 + (number % 3) as i64;
    let values: Vec<f32> =
        (0..rows * 4).map(|i| ((number as f32 * 1.7 + i as f32 * 0.37).sin() * 1.3) + 0.1).collect();
    Tensor::from_slice(&values).view([rows, 4])
}

/// The first difference between two states, to the bit.
pub fn difference_of(a: &State, b: &State) -> Option<String> {
    let names = |state: &State| state.iter().map(|(name, _)| name.to_owned()).collect::<Vec<_>>();
    if names(a) != names(b) {
        return Some(format!("{:?} against {:?}", names(a), names(b)));
    }
    a.iter().zip(b.iter()).find_map(|((name, a), (_, b))| {
        let same = match (a, b) {
            (Value::Tensor(a), Value::Tensor(b)) => same_bits(a, b),
            (Value::Float(a), Value::Float(b)) => a.to_bits() == b.to_bits(),
            (Value::Int(a), Value::Int(b)) => a == b,
            (Value::Text(a), Value::Text(b)) => a == b,
            _ => false,
        };
        (!same).then(|| format!("{name}: {a:?} against {b:?}"))
    })
}

/// Equal shape, dtype and bits, NaN included.
pub fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    a.size() == b.size()
        && a.kind() == b.kind()
        && (a.numel() == 0 || {
            let bytes = |t: &Tensor| t.detach().contiguous().view(-1).view_dtype(Kind::Uint8);
            bytes(a).equal(&bytes(b))
        })
}

/// A bf16 model under fp32 master weights or fp32 sums.
pub fn half(masters: bool, seed: i64) -> (nn::VarStore, nn::Linear, Stack) {
    memfit::tch::manual_seed(seed);
    let mut vs = nn::VarStore::new(Device::Cpu);
    let linear = nn::linear(vs.root(), 4, 3, Default::default());
    vs.bfloat16();
    let optimizer = AdamW::new(&vs, AdamWConfig::default().lr(0.01)).unwrap();
    let builder = Stack::of(&vs, optimizer);
    let builder = if masters {
        builder.with(GradAccumulator::every(WINDOW)).with(MasterWeights::fp32())
    } else {
        builder.with(GradAccumulator::every(WINDOW).fp32())
    };
    let stack = builder.build().unwrap();
    (vs, linear, stack)
}
