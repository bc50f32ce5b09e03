//! The fused linear layer and cross-entropy.

mod bytes;
mod half;
mod inputs;
#[path = "../support/mod.rs"]
mod support;
mod training;
mod values;

use memfit::loss::{
    Evaluation, Inputs, LinearCrossEntropy, LinearCrossEntropyConfig as Config, Reduction, TokenLoss,
    evaluate_cross_entropy, linear_cross_entropy,
};
use memfit::memory::PeakScope;
use memfit::strategies::{AmpScaler, GradAccumulator, MicroBatcher, autocast};
use memfit::tch::{Device, Kind, Tensor, nn, no_grad};
use memfit::{CpuOffload, Error, Loss, Stack, checkpoint::Shared};
use support::{difference, live, serial, sgd};

const IGNORED: i64 = -100;

/// One problem, with leaves of its own.
struct Problem {
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    token_weights: Tensor,
}

impl Problem {
    fn new(tokens: i64, width: i64, classes: i64, kind: Kind) -> Self {
        let double = (Kind::Double, Device::Cpu);
        let leaf = |t: Tensor| t.to_kind(kind).set_requires_grad(true);
        let targets = Tensor::randint(classes, [tokens], (Kind::Int64, Device::Cpu));
        if tokens > 3 {
            let _ = targets.narrow(0, 2, 1).fill_(IGNORED);
        }
        Self {
            hidden: leaf(Tensor::randn([tokens, width], double)),
            weight: leaf(Tensor::randn([classes, width], double)),
            bias: leaf(Tensor::randn([classes], double)),
            targets,
            token_weights: Tensor::rand([tokens], double).to_kind(kind),
        }
    }

    /// With small integers, whose products and sums are exact in any order and dtype.
    fn rounded(self) -> Self {
        for tensor in [&self.hidden, &self.weight, &self.bias] {
            let _ = no_grad(|| tensor.shallow_clone().round_().clamp_(-3.0, 3.0));
        }
        self
    }

    fn inputs(&self) -> Inputs<'_> {
        Inputs::new(&self.hidden, &self.weight, &self.targets)
    }

    /// The same problem with the same values in fp64.
    fn exact(&self) -> Self {
        let wide = |t: &Tensor| t.detach().to_kind(Kind::Double);
        let leaf = |t: &Tensor| wide(t).copy().set_requires_grad(true);
        Self {
            hidden: leaf(&self.hidden),
            weight: leaf(&self.weight),
            bias: leaf(&self.bias),
            targets: self.targets.shallow_clone(),
            token_weights: wide(&self.token_weights),
        }
    }
}

/// What a case switches on.
#[derive(Clone, Copy, Debug, Default)]
struct With {
    bias: bool,
    token_weights: bool,
    smoothing: f64,
    z: f64,
    sum: bool,
    seed: Option<f64>,
}

impl With {
    fn config(&self) -> Config {
        let reduction = if self.sum { Reduction::Sum } else { Reduction::Mean };
        Config::default().label_smoothing(self.smoothing).z_loss(self.z).reduction(reduction)
    }

    fn fused(&self, p: &Problem, chunk_bytes: u64) -> TokenLoss {
        let loss = LinearCrossEntropy::new(self.config().chunk_bytes(chunk_bytes)).unwrap();
        let mut inputs = p.inputs();
        if self.bias {
            inputs = inputs.bias(&p.bias);
        }
        if self.token_weights {
            inputs = inputs.token_weights(&p.token_weights);
        }
        loss.loss(&inputs).unwrap()
    }

    /// The plain form, in tch.
    fn plain(&self, p: &Problem) -> Tensor {
        let logits = p.hidden.linear(&p.weight, self.bias.then_some(&p.bias));
        let log_p = logits.log_softmax(-1, p.hidden.kind());
        let counts = p.targets.ne(IGNORED);
        let own = log_p.gather(-1, &p.targets.clamp_min(0).unsqueeze(-1), false).squeeze_dim(-1);
        let z = logits.logsumexp([-1], false).square();
        let mean = log_p.mean_dim([-1].as_slice(), false, None::<Kind>);
        let each = own * -(1.0 - self.smoothing) - mean * self.smoothing + z * self.z;
        let weights = counts.to_kind(p.hidden.kind());
        let weights = if self.token_weights { weights * &p.token_weights } else { weights };
        let sum = (each * &weights).sum(p.hidden.kind());
        if self.sum { sum } else { sum / weights.sum(p.hidden.kind()) }
    }
}

fn gradients(p: &Problem, loss: &Tensor, with: With) -> Vec<Tensor> {
    let mut leaves = vec![&p.hidden, &p.weight];
    if with.bias {
        leaves.push(&p.bias);
    }
    let loss = with.seed.map_or(loss.shallow_clone(), |seed| loss * seed);
    Tensor::run_backward(&[loss], &leaves, false, false)
}

fn cases() -> Vec<With> {
    let none = With::default();
    vec![
        none,
        With { bias: true, ..none },
        With { sum: true, bias: true, seed: Some(0.37), ..none },
        With { token_weights: true, bias: true, ..none },
        With { smoothing: 0.1, ..none },
        With { smoothing: 1.0, sum: true, ..none },
        With { z: 1e-2, bias: true, ..none },
        With { bias: true, token_weights: true, smoothing: 0.2, z: 3e-2, seed: Some(-2.5), sum: false },
    ]
}
