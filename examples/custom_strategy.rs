//! A strategy of your own: an average of the weights that evaluation uses.
//!
//! Run: `cargo run --release --example custom_strategy`

use memfit::optim::{Sgd, SgdConfig};
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};
use memfit::{
    Loss, Mode, Named, NextForward, NextUpdate, Place, Preparation, Result, Stack, Strategy, UpdatePhase,
    Verdict,
};

/// Keeps average ← decay × average + (1 − decay) × weight; 4 bytes per parameter.
#[derive(Debug)]
struct Ema(f64, Vec<(Tensor, Tensor)>); // decay; weights with their averages

impl Strategy for Ema {
    fn place(&self) -> Place {
        Place::Average
    }
    fn prepare(&mut self, preparation: &mut Preparation<'_>) -> Result<()> {
        let pair = |p: &Named| (p.tensor.detach(), p.tensor.detach().copy());
        self.1 = preparation.parameters.iter().map(pair).collect();
        Ok(())
    }
    fn forward(&mut self, mode: &mut Mode, next: NextForward<'_>) -> Result<()> {
        if *mode != Mode::Evaluate {
            return next(mode);
        }
        let kept: Vec<Tensor> = self.1.iter().map(|(weight, _)| weight.copy()).collect();
        self.1.iter_mut().for_each(|(weight, average)| weight.copy_(average));
        let ran = next(mode);
        self.1.iter_mut().zip(&kept).for_each(|((weight, _), kept)| weight.copy_(kept));
        ran
    }
    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        let verdict = next(phase)?;
        for (weight, average) in self.1.iter_mut().filter(|_| verdict == Verdict::Stepped) {
            let _ = average.lerp_(weight, 1.0 - self.0);
        }
        Ok(verdict)
    }
}

fn main() -> Result<()> {
    memfit::tch::manual_seed(7);
    let vs = nn::VarStore::new(Device::Cpu);
    let model = nn::linear(vs.root(), 8, 1, Default::default());
    let optimizer = Sgd::new(&vs, SgdConfig::default().lr(0.2))?;
    let mut training = Stack::of(&vs, optimizer).with(Ema(0.95, Vec::new())).build()?;

    let truth = Tensor::randn([8, 1], (Kind::Float, Device::Cpu));
    let noisy = |rows: i64| {
        let x = Tensor::randn([rows, 8], (Kind::Float, Device::Cpu));
        let noise = Tensor::randn([rows, 1], (Kind::Float, Device::Cpu));
        let y = x.matmul(&truth) + 0.5 * noise;
        (x, y)
    };
    for _ in 0..200 {
        let (x, y) = noisy(8);
        let _ = training
            .step_with(|| Ok(Loss::mean(model.forward(&x).mse_loss(&y, memfit::tch::Reduction::Mean), 8)))?;
    }
    let x = Tensor::randn([512, 8], (Kind::Float, Device::Cpu));
    let error =
        || model.forward(&x).mse_loss(&x.matmul(&truth), memfit::tch::Reduction::Mean).double_value(&[]);
    let average = training.evaluate(|| Ok(error()))?;
    println!("{training}\n");
    println!("squared error of the last weights {:.4}, of their average {average:.4}", error());
    Ok(())
}
