//! What loading on the other core costs a training step on this one.

use std::path::Path;
use std::time::Instant;

use memfit::data::Loaded;
use memfit::optim::{AdamW, AdamWConfig};
use memfit::tch::nn::{self, ModuleT};
use memfit::tch::{self, Device, Kind, Tensor};
use memfit::{Loss, Stack};

use crate::tokens::{Reading, VOCABULARY};
use crate::{Failure, Pairs, images, tokens};

/// Steps of a turn that are not timed: the loader has batches ready when its turn begins.
const WARM_UP: usize = 3;

pub fn tokens(path: &Path, pairs: usize, steps: usize) -> Result<(), Failure> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let embedding = nn::embedding(&root / "tokens", VOCABULARY as i64, 32, Default::default());
    let layers = nn::seq_t()
        .add(nn::linear(&root / "up", 32, 96, Default::default()))
        .add_fn(|x| x.gelu("tanh"))
        .add(nn::linear(&root / "down", 96, 32, Default::default()));
    let loss = |(x, y): &(Tensor, Tensor)| {
        let guess = layers.forward_t(&x.apply(&embedding), true);
        guess.mse_loss(&y.apply(&embedding).detach(), tch::Reduction::Mean)
    };
    turns("tokens", &vs, tokens::loader(path, Reading::ByPosition, 32, 1, true)?, loss, [pairs, steps])
}

/// Batches of 8: the step has to take longer than loading one does.
pub fn images(folder: &Path, pairs: usize, steps: usize) -> Result<(), Failure> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let strided = |stride| nn::ConvConfig { stride, padding: 3, ..Default::default() };
    let layers = nn::seq_t()
        .add(nn::conv2d(&root / "stem", 3, 24, 7, strided(2)))
        .add_fn(|x| x.relu())
        .add(nn::conv2d(&root / "next", 24, 24, 7, strided(4)))
        .add_fn(|x| x.relu().mean_dim([2_i64, 3].as_slice(), false, Kind::Float))
        .add(nn::linear(&root / "head", 24, 10, Default::default()));
    let loss = |(x, y): &(Tensor, Tensor)| layers.forward_t(x, true).cross_entropy_for_logits(y);
    turns("images", &vs, images::loader(folder, 1, 8, 1, true)?, loss, [pairs, steps])
}

/// Steps with the loader's batches and with batches in memory, in turns.
fn turns(
    name: &str,
    vs: &nn::VarStore,
    mut loader: Pairs,
    loss: impl Fn(&(Tensor, Tensor)) -> Tensor,
    [pairs, steps]: [usize; 2],
) -> Result<(), Failure> {
    tch::set_num_threads(1);
    let mut stack = Stack::of(vs, AdamW::new(vs, AdamWConfig::default())?).build()?;
    let mut step = |batch: &(Tensor, Tensor)| stack.step_with(|| Ok(Loss::of(loss(batch)))).map(drop);
    let mut memory = Vec::new();
    for _ in 0..4 {
        let (x, y) = next(&mut loader)?.batch;
        memory.push((x.copy(), y.copy()));
    }
    let (mut ratios, mut milliseconds) = (Vec::new(), Vec::new());
    for pair in 0..pairs {
        let (mut loaded, mut resident) = (0.0, 0.0);
        // Either goes first as often.
        for loading in [pair % 2 == 0, pair % 2 != 0] {
            if loading {
                loaded = turn(steps, |_| Ok(step(&next(&mut loader)?.batch)?))?;
            } else {
                resident = turn(steps, |index| Ok(step(&memory[index % memory.len()])?))?;
            }
        }
        ratios.push(loaded / resident);
        milliseconds.push(resident * 1e3);
    }
    ratios.sort_by(f64::total_cmp);
    milliseconds.sort_by(f64::total_cmp);
    let (least, middle, most) = (ratios[0], ratios[pairs / 2], ratios[pairs - 1]);
    println!("{name}: {middle:.3} ({least:.3}–{most:.3}) of the time with data in memory");
    println!("{name}: a step takes {:.0} ms", milliseconds[pairs / 2]);
    Ok(())
}

/// Seconds of one step, after some that are not timed.
fn turn(steps: usize, mut step: impl FnMut(usize) -> Result<(), Failure>) -> Result<f64, Failure> {
    for index in 0..WARM_UP {
        step(index)?;
    }
    let start = Instant::now();
    for index in 0..steps {
        step(index)?;
    }
    Ok(start.elapsed().as_secs_f64() / steps as f64)
}

/// The next batch, of the next epoch where this one is over.
fn next(loader: &mut Pairs) -> Result<Loaded<(Tensor, Tensor)>, Failure> {
    match loader.next() {
        Some(batch) => Ok(batch?),
        None => Ok(loader.next().ok_or("an epoch without a batch")??),
    }
}
