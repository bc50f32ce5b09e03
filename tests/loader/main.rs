//! The loader: order, batches, positions, failures, memory.

mod budget;
mod failures;
mod gate;
mod memory;
mod order;
mod ranks;
mod retries;
mod samples;
mod seeks;
#[path = "../support/mod.rs"]
mod support;
mod threads;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use memfit::data::{Loaded, Loader, LoaderBuilder, Random, Source, Tail};
use memfit::tch::{Kind, Tensor};
use memfit::{Batch, DataPosition, Error, Result};
use support::waiting::{until, until_others_wait};
use support::{live, serial, values};

/// The numbers below a limit; some are bad.
struct Numbers {
    len: u64,
    bad: fn(u64) -> bool,
}

fn numbers(len: u64) -> Numbers {
    Numbers { len, bad: |_| false }
}

impl Source for Numbers {
    type Sample = i64;

    fn len(&self) -> u64 {
        self.len
    }

    fn get(&self, index: u64, _: &mut Random) -> Result<i64> {
        if (self.bad)(index) { Err(Error::data("it is bad")) } else { Ok(index as i64) }
    }
}

type Numbered = LoaderBuilder<u64, i64>;

fn load(len: u64, settings: impl FnOnce(Numbered) -> Numbered) -> Loader<Tensor> {
    settings(Loader::new(numbers(len))).build().unwrap()
}

fn ints(batch: &Tensor) -> Vec<u64> {
    values(batch).into_iter().map(|value| value as u64).collect()
}

/// The batches of one epoch.
fn epoch(loader: &mut Loader<Tensor>) -> Vec<Vec<u64>> {
    loader.map(|batch| ints(&batch.unwrap())).collect()
}

/// Records that take a while, and an end by an error.
struct Slow {
    next: u64,
    ends: u64,
}

impl memfit::data::Stream for Slow {
    type Record = i64;

    fn begin(&mut self, _: u64, _: Option<memfit::Mark>) -> Result<()> {
        self.next = 0;
        Ok(())
    }

    fn next(&mut self) -> Option<Result<(i64, memfit::data::Origin)>> {
        std::thread::sleep(Duration::from_millis(1));
        self.next += 1;
        let gone = std::io::Error::other("the line is dead");
        Some(if self.next > self.ends {
            Err(Error::Io { action: "reading", path: "a line".into(), source: gone })
        } else {
            Ok((self.next as i64, memfit::data::Origin::default()))
        })
    }
}

/// The same numbers one after another.
struct Following(Numbers, u64);

impl memfit::data::Stream for Following {
    type Record = i64;

    fn begin(&mut self, _: u64, _: Option<memfit::Mark>) -> Result<()> {
        self.1 = 0;
        Ok(())
    }

    fn next(&mut self) -> Option<Result<(i64, memfit::data::Origin)>> {
        let at = self.1;
        self.1 += 1;
        let read = self.0.get(at, &mut Random::of_sample(0, 0, 0));
        (at < self.0.len).then(|| read.map(|number| (number, memfit::data::Origin::default())))
    }
}
