//! Every optimizer with state of its own kind, and a small model for it.

use memfit::Update;
use memfit::optim::{
    Adafactor, AdafactorConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, Decay, Lion, LionConfig,
    Muon, MuonConfig, Optimizer, Sgd, SgdConfig,
};
use memfit::state::Named;
use memfit::tch::{Device, Kind, Tensor};

/// One optimizer, the dtype of the weights it is tried on, and its bytes of state.
pub struct Member {
    pub name: &'static str,
    pub weights: Kind,
    pub make: fn(&[Named]) -> Box<dyn Optimizer>,
    /// Of a parameter with that many elements.
    pub bytes: fn(u64) -> u64,
    /// The most temporary bytes of a step of [`Net`].
    pub scratch: u64,
}

impl Member {
    fn scratch(self, scratch: u64) -> Self {
        Self { scratch, ..self }
    }
}

fn adamw(weights: &[Named], config: AdamWConfig) -> Box<dyn Optimizer> {
    Box::new(AdamW::new(weights, config.lr(0.01)).unwrap())
}

fn lion(weights: &[Named], config: LionConfig) -> Box<dyn Optimizer> {
    Box::new(Lion::new(weights, config.lr(0.01)).unwrap())
}

fn sgd(weights: &[Named], config: SgdConfig) -> Box<dyn Optimizer> {
    Box::new(Sgd::new(weights, config.lr(0.01)).unwrap())
}

fn eight(weights: &[Named], config: AdamW8bitConfig) -> Box<dyn Optimizer> {
    Box::new(AdamW8bit::new(weights, config.lr(0.01)).unwrap())
}

fn adafactor(weights: &[Named], config: AdafactorConfig) -> Box<dyn Optimizer> {
    Box::new(Adafactor::new(weights, config).unwrap())
}

fn muon(weights: &[Named], config: MuonConfig) -> Box<dyn Optimizer> {
    let (matrices, others): (Vec<_>, Vec<_>) =
        weights.iter().map(|w| Named::new(w.name.clone(), &w.tensor)).partition(|w| w.tensor.dim() > 1);
    let config = config.lr(0.01).others(config.others.lr(0.01));
    Box::new(Muon::new(&matrices, &others, config).unwrap())
}

/// 4·(rows + columns) of [`Net`]'s matrices.
fn factored_bytes(n: u64) -> u64 {
    match n {
        5000 => 4 * (50 + 100),
        300 => 4 * (100 + 3),
        n => 4 * n,
    }
}

/// 4 for matrices, 8 for others.
fn muon_bytes(n: u64) -> u64 {
    if n > 3 { 4 * n } else { 8 * n }
}

/// 2·(n + 4·⌈n/256⌉) from 4,096 elements on.
pub fn eight_bytes(n: u64) -> u64 {
    if n < 4096 { 8 * n } else { 2 * (n + 4 * n.div_ceil(256)) }
}

macro_rules! member {
    ($name:literal, $weights:ident, $make:ident($config:expr), $bytes:expr) => {
        Member {
            name: $name,
            weights: Kind::$weights,
            make: |w| $make(w, $config),
            bytes: $bytes,
            scratch: 0,
        }
    };
}

pub fn every_optimizer() -> Vec<Member> {
    vec![
        member!("SGD", Float, sgd(SgdConfig::default()), |_| 0),
        member!("momentum", Float, sgd(SgdConfig::default().momentum(0.9).weight_decay(0.1)), |n| 4 * n),
        member!("Nesterov", Float, sgd(SgdConfig::default().nesterov(0.9)), |n| 4 * n),
        member!("momentum, bf16", BFloat16, sgd(SgdConfig::default().momentum(0.9)), |n| 2 * n),
        member!("SGD, bf16, stochastic", BFloat16, sgd(SgdConfig::default().stochastic_rounding(3)), |_| 0),
        member!(
            "momentum, fp16, stochastic",
            Half,
            sgd(SgdConfig::default().momentum(0.9).stochastic_rounding(3)),
            |n| 2 * n
        ),
        member!(
            "Nesterov, decoupled",
            Float,
            sgd(SgdConfig::default().nesterov(0.9).weight_decay(0.1).decay(Decay::Decoupled)),
            |n| 4 * n
        ),
        member!("SGD, fp64, decoupled", Double, sgd(SgdConfig::default().decay(Decay::Decoupled)), |_| 0),
        member!("AdamW", Float, adamw(AdamWConfig::default()), |n| 8 * n),
        member!("Adam", Float, adamw(AdamWConfig::default().decay(Decay::InGradient)), |n| 8 * n),
        member!("AdamW, fp64", Double, adamw(AdamWConfig::default()), |n| 16 * n),
        member!("AdamW, bf16", BFloat16, adamw(AdamWConfig::default()), |n| 4 * n),
        member!("AdamW, fp16", Half, adamw(AdamWConfig::default()), |n| 4 * n),
        member!("AdamW, bf16 moments", Float, adamw(AdamWConfig::default().moments(Kind::BFloat16)), |n| 4
            * n),
        member!(
            "AdamW, bf16, fp32 moments",
            BFloat16,
            adamw(AdamWConfig::default().moments(Kind::Float)),
            |n| 8 * n
        ),
        member!("AdamW, fp16, fp32 moments", Half, adamw(AdamWConfig::default().moments(Kind::Float)), |n| 8
            * n),
        member!(
            "AdamW, fp64, fp32 moments",
            Double,
            adamw(AdamWConfig::default().moments(Kind::Float)),
            |n| 8 * n
        ),
        member!(
            "AdamW, bf16, stochastic",
            BFloat16,
            adamw(AdamWConfig::default().stochastic_rounding(3)),
            |n| 4 * n
        ),
        member!("AdamW, fp16, stochastic", Half, adamw(AdamWConfig::default().stochastic_rounding(3)), |n| 8
            * n),
        member!("Lion", Float, lion(LionConfig::default()), |n| 4 * n),
        member!("Lion, fp64", Double, lion(LionConfig::default()), |n| 8 * n),
        member!("Lion, bf16 moment", Float, lion(LionConfig::default().moments(Kind::BFloat16)), |n| 2 * n),
        member!(
            "Lion, bf16, stochastic",
            BFloat16,
            lion(LionConfig::default().stochastic_rounding(3)),
            |n| 2 * n
        ),
        member!("Lion, fp16, stochastic", Half, lion(LionConfig::default().stochastic_rounding(3)), |n| 2
            * n),
        member!("8-bit", Float, eight(AdamW8bitConfig::default()), eight_bytes),
        member!(
            "8-bit, bf16, stochastic",
            BFloat16,
            eight(AdamW8bitConfig::default().stochastic_rounding(3)),
            eight_bytes
        ),
        member!("8-bit, fp16", Half, eight(AdamW8bitConfig::default()), eight_bytes),
        // A number for each column of the widest matrix, and 16 B.
        member!("Adafactor", Float, adafactor(AdafactorConfig::default()), factored_bytes).scratch(416),
        member!("Adafactor, momentum", Float, adafactor(AdafactorConfig::default().beta1(0.9)), |n| 4 * n
            + factored_bytes(n))
        .scratch(416),
        member!(
            "Adafactor, bf16, stochastic",
            BFloat16,
            adafactor(AdafactorConfig::default().stochastic_rounding(3)),
            factored_bytes
        )
        .scratch(416),
        // 50 × 100: the Gram matrix, its polynomial and a lane, and sums.
        member!("Muon", Float, muon(MuonConfig::default()), muon_bytes).scratch(2 * 10_048 + 20_032 + 64),
        member!(
            "Muon, bf16, stochastic",
            BFloat16,
            muon(
                MuonConfig::default()
                    .others(AdamWConfig::default().moments(Kind::Float).stochastic_rounding(3))
            ),
            muon_bytes
        )
        .scratch(2 * 10_048 + 2 * 20_032 + 64),
    ]
}

/// Weights of some shapes: one that is quantised, with a last block that is not whole, and two
/// that are too small.
pub struct Net {
    pub weights: Vec<Tensor>,
    x: Tensor,
}

pub const ELEMENTS: [u64; 3] = [5000, 300, 3];

impl Net {
    pub fn new(kind: Kind) -> Self {
        memfit::tch::manual_seed(7);
        let weight = |size: &[i64]| {
            let values = Tensor::randn(size, (Kind::Float, Device::Cpu)) * 0.3;
            values.to_kind(kind).set_requires_grad(true)
        };
        let weights = vec![weight(&[50, 100]), weight(&[100, 3]), weight(&[3])];
        Self { weights, x: Tensor::randn([5, 50], (Kind::Float, Device::Cpu)).to_kind(kind) }
    }

    pub fn named(&self) -> Vec<Named> {
        let names = ["a", "b", "bias"];
        names.iter().zip(&self.weights).map(|(name, weight)| Named::new(*name, weight)).collect()
    }

    pub fn zero(&self) {
        self.weights.iter().for_each(|weight| weight.shallow_clone().zero_grad());
    }

    pub fn loss(&self) -> Tensor {
        let w = &self.weights;
        let y = self.x.matmul(&w[0]).tanh().matmul(&w[1]) + &w[2];
        y.square().sum(w[0].kind())
    }

    pub fn backward(&self, scale: f64) {
        (self.loss() * scale).backward();
    }

    pub fn values(&self) -> Vec<Tensor> {
        super::copies(&self.weights)
    }

    /// Steps with gradients multiplied by `scale` and divided by it again.
    pub fn run(&self, steps: usize, optimizer: &mut dyn Optimizer, scale: f64) {
        for _ in 0..steps {
            self.zero();
            self.backward(scale);
            optimizer.step(&Update { divisor: scale, ..Update::plain() }).unwrap();
        }
    }
}
