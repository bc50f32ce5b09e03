//! What happens to a batch while a worker makes it, outside the lock.

use tch::Tensor;

use super::*;
use crate::data::buffers::Buffers;
use crate::data::collate::Stacked;
use crate::error::Result;

type Numbers = Slot<u64, i64, Stacked>;

fn slot(rows: u64) -> Numbers {
    let sample = |place| PlannedSample { place, job: Ok(place) };
    Slot::new(Planned { jobs: (0..rows).map(sample).collect(), after: DataPosition::default() })
}

fn bring(slot: &Numbers, share: &Share, buffers: &Buffers) {
    for row in &share.rows {
        slot.put(share, *row, *row as i64, &Stacked, buffers).expect("a number");
    }
}

fn end(partial: &mut <Stacked as Collate<i64>>::Partial, present: &[usize]) -> Result<Tensor> {
    Collate::<i64>::end(&Stacked, partial, present)
}

#[test]
fn a_batch_that_is_begun_anew_while_a_worker_makes_it_is_made_again() {
    let (slot, buffers) = (slot(2), Buffers::keeping(2));
    let share = slot.share(2).expect("rows");
    bring(&slot, &share, &buffers);
    let mut others = None;
    let told = slot.leave(&share, |partial, present| {
        assert!(!slot.hold(), "a worker has it");
        slot.feed_again();
        others = slot.share(2);
        end(partial, present)
    });
    let others = others.expect("rows again");
    assert!(!told && !slot.is_done() && !slot.wants(&share), "what was made is void");
    assert!(slot.share(2).is_none(), "a worker is on it");
    bring(&slot, &others, &buffers);
    assert!(slot.leave(&others, end));
    let Front::Done(done) = slot.front() else { panic!() };
    assert_eq!(Vec::<i64>::try_from(done.batch.expect("a batch")).expect("numbers"), [0, 1]);
}

#[test]
fn a_batch_that_is_abandoned_while_a_worker_makes_it_is_gone_once_that_is_back() {
    let (slot, buffers) = (slot(1), Buffers::keeping(2));
    let share = slot.share(1).expect("rows");
    bring(&slot, &share, &buffers);
    slot.leave(&share, |partial, present| {
        assert!(slot.abandon() && !slot.is_left());
        end(partial, present)
    });
    assert!(slot.is_left() && !slot.is_done() && slot.share(1).is_none());
}

#[test]
fn samples_for_a_batch_that_is_abandoned_are_dropped() {
    let (slot, buffers) = (slot(2), Buffers::keeping(2));
    let share = slot.share(1).expect("rows");
    assert!(!slot.abandon(), "none makes the batch of it");
    assert!(!slot.wants(&share));
    bring(&slot, &share, &buffers);
    assert!(slot.lock().partial.is_none() && slot.lock().present.is_empty());
}
