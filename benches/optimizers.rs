//! What one update of each optimizer costs, per parameter and against the fused fp32 AdamW.

mod support;

use memfit::Update;
use memfit::optim::{AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, Lion, LionConfig, Optimizer};
use memfit::tch::{Device, Kind, Tensor};

/// A weight matrix with a gradient.
fn weights(count: i64, kind: Kind) -> Vec<Tensor> {
    let w = Tensor::randn([count / 1024, 1024], (kind, Device::Cpu)).set_requires_grad(true);
    let grad = Tensor::randn([count / 1024, 1024], (kind, Device::Cpu));
    (&w * grad).sum(kind).backward();
    vec![w]
}

type Make = fn(&Vec<Tensor>) -> memfit::Result<Box<dyn Optimizer>>;

const ROWS: &[(&str, Kind, Make)] = &[
    ("AdamW", Kind::Float, |w| adamw(w, AdamWConfig::default())),
    ("AdamW, bf16 moments", Kind::Float, |w| adamw(w, AdamWConfig::default().moments(Kind::BFloat16))),
    ("AdamW, bf16", Kind::BFloat16, |w| adamw(w, AdamWConfig::default())),
    ("AdamW, bf16, stochastic", Kind::BFloat16, |w| adamw(w, AdamWConfig::default().stochastic_rounding(1))),
    ("AdamW, bf16, fp32 moments", Kind::BFloat16, |w| adamw(w, AdamWConfig::default().moments(Kind::Float))),
    ("Lion", Kind::Float, |w| lion(w, LionConfig::default())),
    ("Lion, bf16 moment", Kind::Float, |w| lion(w, LionConfig::default().moments(Kind::BFloat16))),
    ("AdamW8bit", Kind::Float, |w| eight(w, AdamW8bitConfig::default())),
    ("AdamW8bit, bf16, stochastic", Kind::BFloat16, |w| {
        eight(w, AdamW8bitConfig::default().stochastic_rounding(1))
    }),
];

fn adamw(w: &Vec<Tensor>, config: AdamWConfig) -> memfit::Result<Box<dyn Optimizer>> {
    Ok(Box::new(AdamW::new(w, config)?))
}

fn lion(w: &Vec<Tensor>, config: LionConfig) -> memfit::Result<Box<dyn Optimizer>> {
    Ok(Box::new(Lion::new(w, config)?))
}

fn eight(w: &Vec<Tensor>, config: AdamW8bitConfig) -> memfit::Result<Box<dyn Optimizer>> {
    Ok(Box::new(AdamW8bit::new(w, config)?))
}

fn main() -> memfit::Result<()> {
    let measures = support::measures();
    let count: i64 = if measures { 50 << 20 } else { 1 << 16 };
    let plain = weights(count, Kind::Float);
    let mut fused = AdamW::new(&plain, AdamWConfig::default())?;
    fused.step(&Update::plain())?;
    for (name, kind, make) in ROWS {
        let w = weights(count, *kind);
        let mut optimizer = make(&w)?;
        optimizer.step(&Update::plain())?;
        let bytes = optimizer.state_bytes() as f64 / count as f64;
        let mut failed = None;
        support::print_peak(name, || failed = failed.take().or(optimizer.step(&Update::plain()).err()));
        let (ours, theirs) = support::in_turns(
            if measures { 7 } else { 1 },
            if measures { 3 } else { 1 },
            || failed = failed.take().or(optimizer.step(&Update::plain()).err()),
            || drop(fused.step(&Update::plain())),
        );
        if let Some(error) = failed {
            return Err(error);
        }
        println!(
            "{name:<28} {:>8.1} ms  {:>6.3} ns per parameter  {:>6.2} of fused AdamW  {bytes:.3} B of state",
            ours * 1e3,
            ours * 1e9 / count as f64,
            ours / theirs
        );
    }
    Ok(())
}
