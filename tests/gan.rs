//! Several optimizers under one loss scale: a GAN against the loop written by hand.

mod support;

use memfit::optim::{AdamW, AdamWConfig, Optimizer};
use memfit::step::Update;
use memfit::strategies::{AmpScaler, autocast};
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};
use memfit::{Loss, Result, Stack};
use support::{copies, same, serial};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);
const SCALE: f64 = 4096.0;

struct Pair {
    g_vs: nn::VarStore,
    d_vs: nn::VarStore,
    generator: Box<dyn Module>,
    discriminator: Box<dyn Module>,
}

impl Pair {
    fn new() -> Self {
        memfit::tch::manual_seed(1);
        let g_vs = nn::VarStore::new(Device::Cpu);
        let d_vs = nn::VarStore::new(Device::Cpu);
        let net = |vs: nn::Path, out: i64| {
            nn::seq()
                .add(nn::linear(&vs / 0, 2, 16, Default::default()))
                .add_fn(|x| x.leaky_relu())
                .add(nn::linear(&vs / 1, 16, out, Default::default()))
        };
        let generator = Box::new(net(g_vs.root(), 2));
        let discriminator = Box::new(net(d_vs.root(), 1));
        Self { g_vs, d_vs, generator, discriminator }
    }

    fn optimizer(vs: &nn::VarStore) -> AdamW {
        AdamW::new(vs, AdamWConfig::default().lr(0.01).betas(0.5, 0.9)).unwrap()
    }

    /// How far the discriminator is from calling `x` real or fake.
    fn verdict(&self, x: &Tensor, real: bool) -> Tensor {
        let sign = if real { -1.0 } else { 1.0 };
        (self.discriminator.forward(x).to_kind(Kind::Float) * sign).softplus().mean(Kind::Float)
    }

    fn d_loss(&self) -> Tensor {
        let real = Tensor::randn([8, 2], CPU) + 3.0;
        let fake = self.generator.forward(&Tensor::randn([8, 2], CPU)).detach();
        self.verdict(&real, true) + self.verdict(&fake, false)
    }

    fn g_loss(&self) -> Tensor {
        self.verdict(&self.generator.forward(&Tensor::randn([8, 2], CPU)), true)
    }

    fn weights(&self) -> Vec<Tensor> {
        copies(&[self.g_vs.trainable_variables(), self.d_vs.trainable_variables()].concat_shallow())
    }
}

trait ConcatShallow {
    fn concat_shallow(&self) -> Vec<Tensor>;
}

impl ConcatShallow for [Vec<Tensor>; 2] {
    fn concat_shallow(&self) -> Vec<Tensor> {
        self.iter().flatten().map(Tensor::shallow_clone).collect()
    }
}

fn by_hand(steps: usize) -> Vec<Tensor> {
    let pair = Pair::new();
    let mut optimizers = [Pair::optimizer(&pair.d_vs), Pair::optimizer(&pair.g_vs)];
    memfit::tch::manual_seed(2);
    for _ in 0..steps {
        for (which, optimizer) in optimizers.iter_mut().enumerate() {
            optimizer.zero_grad();
            let loss = autocast(Device::Cpu, Kind::Half, || {
                Ok(if which == 0 { pair.d_loss() } else { pair.g_loss() })
            });
            (loss.unwrap() * SCALE).backward();
            for group in optimizer.groups() {
                for parameter in group.parameters() {
                    let unscaled = parameter.tensor.grad() / SCALE;
                    support::set_grad(&parameter.tensor, &unscaled);
                }
            }
            optimizer.step(&Update::plain()).unwrap();
        }
    }
    pair.weights()
}

#[test]
fn a_gan_trains_under_one_scale_as_by_hand() -> Result<()> {
    let _guard = serial();
    let pair = Pair::new();
    let scaler = AmpScaler::fp16_with(|config| config.init_scale = SCALE)?;
    let mut d_training = Stack::of(&pair.d_vs, Pair::optimizer(&pair.d_vs)).with(scaler.share()).build()?;
    let mut g_training = Stack::of(&pair.g_vs, Pair::optimizer(&pair.g_vs)).with(scaler.share()).build()?;
    memfit::tch::manual_seed(2);
    for _ in 0..50 {
        assert!(d_training.step_with(|| Ok(Loss::of(pair.d_loss())))?.stepped());
        assert!(g_training.step_with(|| Ok(Loss::of(pair.g_loss())))?.stepped());
    }
    assert!(same(&pair.weights(), &by_hand(50)));
    assert_eq!(scaler.scale(), Some(SCALE));
    // It learns: what it makes has come nearer to the data's mean of 3.
    let made = pair.generator.forward(&Tensor::randn([256, 2], CPU)).mean(Kind::Float).double_value(&[]);
    assert!(made > 0.5, "{made}");
    Ok(())
}
