//! What a seek leaves of what was made ahead: nothing, and at once.

use super::gate::Gate;
use super::*;

/// Places of the epoch that belong together.
const REGION: u64 = 1_000;
const ROUNDS: u64 = 6;

/// Rows of some places wait until their region is opened.
#[derive(Default)]
struct Regions {
    /// Regions that are open: all below.
    open: Gate,
    /// Of each region, rows that have come to wait.
    waiting: [Gate; ROUNDS as usize],
    /// Rows, of those that wait, that were made.
    made: AtomicUsize,
}

impl Regions {
    fn pass(&self, index: u64) {
        let region = index / REGION;
        self.waiting[region as usize].add();
        self.open.wait_for(region + 1);
        self.made.fetch_add(1, Ordering::SeqCst);
    }
}

/// Goes to the start of a region, of a loader that was begun.
fn go(loader: &mut Loader<Tensor>, region: u64) {
    let mut position = loader.data_position();
    position.samples = region * REGION;
    loader.seek(position).unwrap();
}

#[test]
fn workers_leave_what_a_seek_made_void_at_their_next_sample() {
    let _serial = serial();
    let regions = Arc::new(Regions::default());
    let rows = regions.clone();
    let loader = Loader::new(numbers(ROUNDS * REGION)).map(move |n, _| {
        // The first batch of a region is there at once.
        if n as u64 % REGION >= 100 {
            rows.pass(n as u64);
        }
        Ok(n)
    });
    // A worker takes 25 rows at once.
    let mut loader = loader.batch(100).workers(2).prefetch(3).build().unwrap();
    loader.seek(DataPosition::default()).unwrap();
    for region in 0..ROUNDS {
        go(&mut loader, region);
        if region > 0 {
            regions.open.add();
        }
        let batch = loader.next().unwrap().unwrap();
        assert_eq!(ints(&batch)[0], region * REGION);
        regions.waiting[region as usize].wait_for(2);
        assert_eq!(regions.made.load(Ordering::SeqCst), 2 * region as usize, "one row of each worker");
    }
    regions.open.add();
    drop(loader);
}

#[test]
fn batches_of_before_a_seek_are_not_alive_beside_the_new_ones() {
    let _serial = serial();
    let (row, prefetch) = (1_usize << 16, 2);
    let regions = Arc::new(Regions::default());
    let rows = regions.clone();
    let loader = Loader::new(numbers(ROUNDS * REGION)).map(move |n, _| {
        let at = n as u64 % REGION;
        // Two batches are there at once, of the next two one row is.
        if at >= 4 && at % 2 == 1 {
            rows.pass(n as u64);
        }
        Ok(vec![n as u8; row])
    });
    let mut loader = loader.batch(2).workers(4).prefetch(prefetch).build().unwrap();
    let before = live();
    let bound = ((prefetch + 2) * 2 * row) as u64;
    loader.seek(DataPosition::default()).unwrap();
    for region in 0..ROUNDS {
        go(&mut loader, region);
        // Two workers are still in the last region's rows.
        let held = [loader.next().unwrap().unwrap(), loader.next().unwrap().unwrap()];
        regions.waiting[region as usize].wait_for(2);
        until("each has a row that is there", || live() - before >= bound);
        for _ in 0..100 {
            assert!(live() - before <= bound, "{} of {bound}", live() - before);
            std::thread::sleep(Duration::from_micros(100));
        }
        drop(held);
        if region > 0 {
            regions.open.add();
        }
    }
    regions.open.add();
    drop(loader);
    assert_eq!(live(), before);
}

/// A batch that is made by a function which waits.
#[test]
fn a_batch_that_is_made_in_vain_counts_until_it_is_gone() {
    let _serial = serial();
    let (entered, leave) = (Arc::new(Gate::default()), Arc::new(Gate::default()));
    let made = Arc::new(AtomicUsize::new(0));
    let (came, go_on, count) = (entered.clone(), leave.clone(), made.clone());
    let collate = move |samples: &[&i64]| {
        count.fetch_add(1, Ordering::SeqCst);
        if *samples[0] == 1 {
            came.add();
            go_on.wait_for(1);
        }
        Ok(Tensor::from_slice(&samples.iter().map(|n| **n).collect::<Vec<_>>()))
    };
    let loader = Loader::new(numbers(3 * REGION)).batch(1).workers(3).prefetch(1).collate_with(collate);
    let mut loader = loader.build().unwrap();
    loader.seek(DataPosition::default()).unwrap();
    assert_eq!(ints(&loader.next().unwrap().unwrap()), [0]);
    entered.wait_for(1);
    let mut position = loader.data_position();
    position.samples = 7;
    loader.seek(position).unwrap();
    // Two workers have nothing to do, and still make nothing beside it.
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(made.load(Ordering::SeqCst), 2, "batches 0 and 1");
    leave.add();
    assert_eq!(ints(&loader.next().unwrap().unwrap()), [7]);
}
