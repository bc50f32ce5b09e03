//! The README's example, as a user's crate has it.

use memfit::checkpoint::ActivationCheckpoint;
use memfit::optim::{AdamW, AdamWConfig};
use memfit::strategies::{AmpScaler, Cosine, GradAccumulator, GradClip};
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};
use memfit::{Loss, Stack};

fn block(vs: nn::Path, width: i64) -> nn::Sequential {
    nn::seq()
        .add(nn::linear(&vs / "up", width, 4 * width, Default::default()))
        .add_fn(|x| x.gelu("tanh"))
        .add(nn::linear(&vs / "down", 4 * width, width, Default::default()))
}

fn main() -> memfit::Result<()> {
    let vs = nn::VarStore::new(Device::cuda_if_available());
    let model = nn::seq()
        .add(ActivationCheckpoint::new(block(vs.root() / 0, 32)))
        .add(ActivationCheckpoint::new(block(vs.root() / 1, 32)));
    let mut training = Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default().lr(3e-4))?)
        .with(AmpScaler::bf16())
        .with(GradAccumulator::every(4))
        .with(GradClip::norm(1.0))
        .with(Cosine::new(1_000).warm_up(100))
        .build()?;
    let batches = (0..8).map(|_| Tensor::randn([16, 32], (Kind::Float, vs.device())));
    for micro in training.windows(batches) {
        let outcome = training.step(micro?, |x| {
            Ok(Loss::mean((model.forward(x) - x).square().mean(Kind::Float), x.size()[0]))
        })?;
        println!("{outcome:?}");
    }
    println!("{training}");
    assert_eq!(training.position().steps, 2);
    Ok(())
}
