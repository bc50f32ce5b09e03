//! The memory of batches of varying size: used again, bounded, and nobody else's.

mod support;

use memfit::data::{Collate, Loader, Pack, Pad, Random, Source, Transfer};
use memfit::memory::{Limit, Stats, stats};
use memfit::tch::{Device, Kind, Tensor};
use memfit::{Error, Result};
use support::waiting::until_others_wait;
use support::{live, serial, values};

/// Record i has the token i and the label −i. The four of a batch are of nearly the length that their batch has.
#[derive(Clone, Copy)]
struct Varying {
    batches: u64,
    /// Of a batch, in units of [`LEAST`].
    length: fn(u64) -> u64,
}

impl Varying {
    fn length(self, index: u64) -> usize {
        (self.length)(index / 4) as usize * LEAST - (index % 4) as usize
    }
}

const LEAST: usize = 8;

impl Source for Varying {
    type Sample = (Vec<i64>, Vec<i32>);

    fn len(&self) -> u64 {
        4 * self.batches
    }

    fn get(&self, index: u64, _: &mut Random) -> Result<Self::Sample> {
        let length = self.length(index);
        Ok((vec![index as i64; length], vec![-(index as i32); length]))
    }
}

fn counted() -> Stats {
    stats(Device::Cpu).unwrap()
}

fn load<C: Collate<(Vec<i64>, Vec<i32>)>>(source: Varying, workers: usize, collate: C) -> Loader<C::Batch> {
    Loader::new(source).batch(4).workers(workers).prefetch(2).collate(collate).build().unwrap()
}

/// Allocations of two epochs, the second one's apart; one batch is held while the next is made.
fn allocations<C: Collate<(Vec<i64>, Vec<i32>)>>(source: Varying, workers: usize, collate: C) -> [u64; 2] {
    let mut loader = load(source, workers, collate);
    [(); 2].map(|()| {
        let before = counted().allocations;
        let mut held = None;
        for batch in &mut loader {
            held = Some(batch.unwrap());
        }
        drop(held);
        counted().allocations - before
    })
}

#[test]
fn batches_of_varying_length_stop_allocating() {
    let _serial = serial();
    let source = Varying { batches: 700, length: |batch| 1 + (5 * batch + batch / 7) % 4 };
    // Each new buffer makes the list of their sizes, the largest first, larger: of four buffers and four sizes
    // there are C(8, 4) such lists.
    let most = 70;
    for workers in [0, 2] {
        let padded = allocations(source, workers, Pad::to_longest((0, 0)));
        let packed = allocations(source, workers, Pack::to(4 * LEAST, (0, 0)));
        let sums = [padded, packed].map(|[first, second]| first + second);
        assert!(sums[0] <= 2 * most && sums[1] <= 3 * most, "{sums:?} for 1400 batches");
        if workers == 0 {
            assert_eq!((padded[1], packed[1]), (0, 0));
        }
    }
}

#[test]
fn their_memory_is_that_of_so_many_of_the_largest() {
    let _serial = serial();
    // Each is a little larger than those before, so that no buffer serves again; the last ones are as large.
    let source = Varying { batches: 120, length: |batch| 100 + batch.min(100) };
    let bound = (2 + 2) * 4 * 200 * LEAST as u64 * (8 + 4);
    let before = live();
    let mut loader = load(source, 2, Pad::to_longest((0, 0)));
    let (mut held, mut most) = (None, 0);
    for (index, batch) in (&mut loader).enumerate() {
        held = Some(batch.unwrap());
        if index == 110 {
            // All that are made ahead are there, of the largest.
            until_others_wait();
        }
        most = most.max(live() - before);
    }
    assert!(most <= bound && most > bound / 2, "{most} of {bound}");
    drop((held, loader));
    assert_eq!(live(), before);
}

#[test]
fn a_batch_that_is_held_is_never_written_to() {
    let _serial = serial();
    let source = Varying { batches: 120, length: |batch| 1 + (5 * batch + batch / 7) % 7 };
    let expected = |index: usize| -> Vec<f64> {
        let records = 4 * index as u64..4 * index as u64 + 4;
        records.flat_map(|record| vec![record as f64; source.length(record)]).collect()
    };
    let negative = |numbers: Vec<f64>| -> Vec<f64> { numbers.into_iter().map(|number| -number).collect() };
    for workers in [0, 2] {
        // Some are held to the end, by themselves or by a view, and some for a while.
        let mut kept: Vec<(usize, Tensor, Tensor)> = Vec::new();
        let compare = |(index, tokens, labels): (usize, Tensor, Tensor)| {
            let tokens = tokens.view(-1).masked_select(&labels.view(-1).le(0));
            assert_eq!(values(&tokens), expected(index));
            let labels = labels.view(-1).masked_select(&labels.view(-1).le(0));
            assert_eq!(values(&labels), negative(expected(index)));
        };
        let mut check = |index: usize, tokens: Tensor, labels: Tensor| {
            if index.is_multiple_of(3) {
                let view = |tensor: Tensor| tensor.narrow(0, 0, tensor.size()[0]);
                kept.push((index, view(tokens), view(labels)));
            } else if index % 3 == 1 {
                kept.push((index, tokens, labels));
            }
            if index % 10 == 9 {
                kept.drain(..kept.len() / 2).for_each(compare);
            }
        };
        // A label above 0 is filling.
        for (index, batch) in load(source, workers, Pad::to_longest((9, 1))).enumerate() {
            let (padded, labels) = batch.unwrap().batch;
            check(index, padded.tokens, labels);
        }
        for (index, batch) in load(source, workers, Pack::to(7 * LEAST, (9, 1))).enumerate() {
            let (packed, labels) = batch.unwrap().batch;
            assert_eq!(values(&packed.segments.gt(0).sum(Kind::Int64)), [expected(index).len() as f64]);
            check(index, packed.tokens, labels);
        }
        assert!(kept.len() > 3);
        kept.into_iter().for_each(compare);
    }
}

#[test]
fn free_buffers_of_other_tensors_make_room_for_a_larger_batch() {
    let _serial = serial();
    let source = Varying { batches: 4, length: |batch| 100 + batch / 3 };
    let before = live();
    let mut loader = load(source, 0, Pad::to_longest((0, 0)));
    let held: Vec<_> = loader.by_ref().take(3).map(|batch| batch.unwrap()).collect();
    drop(held);
    let last = 4 * 101 * LEAST as u64 * (8 + 4);
    assert!(live() - before > 2 * last, "the first ones' buffers are there");
    let _limit = Limit::new(before + last + 1000).unwrap();
    assert_eq!(loader.next().unwrap().unwrap().batch.1.size(), [4, 101 * LEAST as i64]);
}

#[test]
fn a_batch_that_does_not_fit_is_told_and_comes_later() {
    let _serial = serial();
    fn told_and_come<B>(mut loader: Loader<B>, tensors: fn(&B) -> [&Tensor; 2])
    where
        B: Transfer + Send + 'static,
    {
        let limit = Limit::new(live() + 100).unwrap();
        for _ in 0..2 {
            assert!(matches!(loader.next(), Some(Err(Error::OutOfMemory { .. }))));
        }
        drop(limit);
        for index in 0..5 {
            let batch = loader.next().unwrap().unwrap();
            let sums = tensors(&batch).map(|tensor| tensor.sum(Kind::Double).double_value(&[]));
            let records = 4 * index..4 * index + 4;
            let sum: u64 = records.map(|record| record * (2 * LEAST as u64 - record % 4)).sum();
            assert_eq!(sums, [sum as f64, -(sum as f64)]);
        }
    }
    let source = Varying { batches: 5, length: |_| 2 };
    for workers in [0, 2] {
        told_and_come(load(source, workers, Pad::to_longest((0, 0))), |(padded, labels)| {
            [&padded.tokens, labels]
        });
        told_and_come(load(source, workers, Pack::to(3 * LEAST, (0, 0))), |(packed, labels)| {
            [&packed.tokens, labels]
        });
    }
}

#[test]
fn what_is_done_to_a_batch_in_place_is_no_history_of_later_ones() {
    let _serial = serial();
    let weight = Tensor::ones([1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let loader = Loader::new(Varying { batches: 10, length: |_| 1 }).map(|(list, _), _| Ok(list[0] as f32));
    for (index, batch) in loader.batch(4).prefetch(1).build().unwrap().enumerate() {
        let mut batch = batch.unwrap().batch;
        assert!(!batch.requires_grad());
        assert_eq!(values(&batch)[0], 4.0 * index as f64);
        let _ = batch.g_add_(&weight);
        assert!(batch.requires_grad());
    }
}
