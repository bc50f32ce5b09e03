//! What batches that were made ahead take of a budget, while a step runs.

use memfit::memory::{Limit, PeakScope};
use memfit::optim::{Sgd, SgdConfig};
use memfit::strategies::MicroBatcher;
use memfit::tch::{Device, nn};
use memfit::{Loss, Split, Stack};

use super::*;

const ROWS: usize = 16;
const WIDTH: usize = 1 << 10;
/// Of a batch.
const BYTES: u64 = (ROWS * WIDTH * 4) as u64;

struct Training {
    w: Tensor,
    stack: Stack,
    _vs: nn::VarStore,
}

impl Training {
    fn new() -> Self {
        let vs = nn::VarStore::new(Device::Cpu);
        let w = vs.root().zeros("w", &[WIDTH as i64]);
        let sgd = Sgd::new(&vs, SgdConfig::default().lr(0.1)).unwrap();
        let stack = Stack::of(&vs, sgd).with(MicroBatcher::new()).build().unwrap();
        Self { w, stack, _vs: vs }
    }

    fn step(&mut self, batch: &Tensor) -> Option<Split> {
        let Self { w, stack, .. } = self;
        let outcome = stack.step_batch(batch, |x| {
            let y = x.f_mul(w)?.f_exp()?.f_square()?;
            Ok(Loss::mean(y.f_mean(Kind::Float)?, x.size()[0]))
        });
        outcome.unwrap().split()
    }

    /// The most that a step takes, its own batch with it and what lives between steps not.
    fn measured(&mut self) -> u64 {
        self.step(&Tensor::ones([ROWS as i64, WIDTH as i64], (Kind::Float, Device::Cpu)));
        let between = live();
        let scope = PeakScope::new(Device::Cpu).unwrap();
        self.step(&Tensor::ones([ROWS as i64, WIDTH as i64], (Kind::Float, Device::Cpu)));
        scope.peak() - between
    }
}

/// The splits of two steps, where the budget is so many bytes short of the step and of what is ahead.
fn splits(prefetch: usize, short: u64) -> Vec<Option<Split>> {
    let mut training = Training::new();
    let step = training.measured();
    let between = live();
    let _limit = Limit::new(between + step + (prefetch as u64 + 1) * BYTES - short).unwrap();
    let loader = Loader::new(numbers(1 << 10)).map(|n, _| Ok(vec![n as f32 / 1e4; WIDTH]));
    let loader = loader.batch(ROWS).workers(2).prefetch(prefetch).build().unwrap();
    // Like windows, it has the next batch in hand while a step runs.
    let mut batches = loader.map(Result::unwrap).peekable();
    let mut splits = Vec::new();
    for index in 0..2 {
        let batch = batches.next().unwrap();
        assert_eq!(values(&batch.select(1, 0))[0] as f32, (index * ROWS) as f32 / 1e4);
        batches.peek().unwrap();
        let full = between + (prefetch as u64 + 2) * BYTES;
        until("all batches are there", || live() == full);
        splits.push(training.step(&batch));
    }
    splits
}

/// Case 60.
#[test]
fn a_step_fits_beside_prefetch_and_one_batches_to_the_byte() {
    let _serial = serial();
    for prefetch in [1, 3] {
        let whole = |split: &Option<Split>| {
            split.as_ref().is_none_or(|split| split.rows == ROWS as i64 && split.retries == 0)
        };
        let fits = splits(prefetch, 0);
        assert!(fits.iter().all(whole), "{fits:?}");
        let short = splits(prefetch, 1);
        let [Some(first), Some(second)] = &short[..] else { panic!("{short:?}") };
        assert!(first.retries == 1 && first.rows == ROWS as i64 / 2, "{first:?}");
        assert!(second.retries == 0 && second.rows == first.rows, "{second:?}");
    }
}
