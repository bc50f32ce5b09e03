//! A device that is none, and batches that are ready when the test says so.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tch::{Device, Tensor};

use super::*;
use crate::data::bad::{Bad, BadRecords};
use crate::data::deliver::{Deliver, Done, Next};
use crate::data::feed::Deal;
use crate::data::{Loader, Tail};

/// Batches of an epoch, each of its own number; batch 1 comes after an error.
const BATCHES: u64 = 4;

/// An engine whose batches are there, or are made when they are asked for.
struct Script {
    next: Mutex<u64>,
    ready: AtomicBool,
}

fn at(samples: u64) -> DataPosition {
    DataPosition { order: 1, samples, ..DataPosition::default() }
}

impl Deliver<Tensor> for Script {
    fn begin(&self, from: DataPosition) -> Result<()> {
        *self.next.lock().unwrap() = from.samples;
        Ok(())
    }

    fn next(&self, _: usize) -> Next<Tensor> {
        let mut next = self.next.lock().unwrap();
        if *next == BATCHES {
            return Next::EpochEnds;
        }
        let number = *next;
        *next += 1;
        let errors = (number == 1).then(|| Error::data("it is bad")).into_iter().collect();
        let batch = Some(Tensor::from_slice(&[number as i64]));
        Next::Batch(Done { errors, batch, own: None }, at(*next))
    }

    fn order(&self) -> u64 {
        1
    }

    fn samples(&self) -> Option<u64> {
        Some(BATCHES)
    }

    fn is_ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst) && *self.next.lock().unwrap() < BATCHES
    }

    fn work(&self) {}

    fn stop(&self) {}

    fn may_hang(&self) -> bool {
        false
    }
}

/// What came to a device, in order, and how often it has no room.
#[derive(Default)]
struct Log {
    events: Vec<(Event, i64)>,
    refused: Vec<Event>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    Send,
    Land,
}

use Event::{Land, Send};

#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Log>>);

impl Fake {
    fn meets(&self, event: Event, batch: &Tensor) -> Result<()> {
        let mut log = self.0.lock().unwrap();
        if let Some(refused) = log.refused.iter().position(|refused| *refused == event) {
            log.refused.remove(refused);
            let device = Device::Cuda(0);
            return Err(Error::OutOfMemory { requested: None, live: None, limit: None, device });
        }
        log.events.push((event, batch.int64_value(&[0])));
        Ok(())
    }

    fn events(&self) -> Vec<(Event, i64)> {
        std::mem::take(&mut self.0.lock().unwrap().events)
    }

    fn refuse(&self, event: Event) {
        self.0.lock().unwrap().refused.push(event);
    }
}

impl Mover<Tensor> for Fake {
    fn send(&self, loaded: &Loaded<Tensor>) -> Result<Sent<Tensor>> {
        self.meets(Send, loaded)?;
        let (fake, batch) = (self.clone(), loaded.batch.shallow_clone());
        Ok(Sent::new(Loaded { batch, position: loaded.position }, move |batch| fake.meets(Land, batch)))
    }
}

fn loader(ready: bool) -> (Fake, Loader<Tensor>) {
    let fake = Fake::default();
    let script = Script { next: Mutex::new(0), ready: AtomicBool::new(ready) };
    let deal = Deal { batch: 1, shuffle: None, rank: 0, world: 1, tail: Tail::Keep };
    let bad = BadRecords::new(Bad::Tell, 0, 1);
    (fake.clone(), Loader::over(Arc::new(script), deal, 0, bad, Some(Box::new(fake))))
}

/// What is given next, where the loader then is, and what the device did for it.
fn step(fake: &Fake, loader: &mut Loader<Tensor>) -> (Option<i64>, u64, Vec<(Event, i64)>) {
    let item = loader.next().expect("an item");
    let number = item.ok().map(|loaded| {
        assert_eq!(loaded.position, loader.data_position());
        loaded.batch.int64_value(&[0])
    });
    (number, loader.data_position().samples, fake.events())
}

#[test]
fn a_batch_that_is_ready_is_sent_one_ahead_and_the_position_is_not_its() {
    let (fake, mut loader) = loader(true);
    assert_eq!(step(&fake, &mut loader), (Some(0), 1, vec![(Send, 0), (Land, 0)]));
    // The error comes first; the batch behind it is sent when it is its turn.
    assert_eq!(step(&fake, &mut loader), (None, 1, vec![]));
    assert_eq!(step(&fake, &mut loader), (Some(1), 2, vec![(Send, 1), (Land, 1), (Send, 2)]));
    assert_eq!(step(&fake, &mut loader), (Some(2), 3, vec![(Land, 2), (Send, 3)]));
    assert_eq!(step(&fake, &mut loader), (Some(3), 4, vec![(Land, 3)]));
    assert!(loader.next().is_none() && loader.epoch() == 1);
}

#[test]
fn a_batch_that_is_not_ready_is_sent_when_it_is_asked_for() {
    let (fake, mut loader) = loader(false);
    assert_eq!(step(&fake, &mut loader), (Some(0), 1, vec![(Send, 0), (Land, 0)]));
    assert_eq!(step(&fake, &mut loader), (None, 1, vec![]));
    for number in 1..4 {
        let events = vec![(Send, number), (Land, number)];
        assert_eq!(step(&fake, &mut loader), (Some(number), number as u64 + 1, events));
    }
    assert!(loader.next().is_none());
}

#[test]
fn a_copy_that_failed_is_told_where_it_was_asked_for_and_tried_again() {
    for refused in [Send, Land] {
        let (fake, mut loader) = loader(true);
        fake.refuse(refused);
        let before = if refused == Land { vec![(Send, 0)] } else { vec![] };
        assert_eq!(step(&fake, &mut loader), (None, 0, before), "{refused:?}");
        let after = if refused == Land { vec![(Land, 0)] } else { vec![(Send, 0), (Land, 0)] };
        assert_eq!(step(&fake, &mut loader), (Some(0), 1, after), "the same batch");
        assert_eq!(loader.filter_map(Result::ok).count(), 3);
    }
}

#[test]
fn a_copy_ahead_of_its_time_that_failed_is_no_error_yet() {
    let (fake, mut loader) = loader(true);
    let _ = (step(&fake, &mut loader), step(&fake, &mut loader));
    // Batch 2 is on its way; there is no room for batch 3 beside it.
    assert_eq!(step(&fake, &mut loader).2.last(), Some(&(Send, 2)));
    fake.refuse(Send);
    assert_eq!(step(&fake, &mut loader), (Some(2), 3, vec![(Land, 2)]));
    assert_eq!(step(&fake, &mut loader), (Some(3), 4, vec![(Send, 3), (Land, 3)]));
}

#[test]
fn what_is_on_its_way_goes_with_a_seek() {
    let (fake, mut loader) = loader(true);
    let given: Vec<_> = (0..4).map(|_| step(&fake, &mut loader)).collect();
    assert_eq!(given[3], (Some(2), 3, vec![(Land, 2), (Send, 3)]));
    loader.seek(at(2)).expect("a place of this order");
    assert_eq!(step(&fake, &mut loader), (Some(2), 3, vec![(Send, 2), (Land, 2), (Send, 3)]));
    assert_eq!(step(&fake, &mut loader), (Some(3), 4, vec![(Land, 3)]));
}
