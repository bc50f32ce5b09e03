//! What is alive of a batch in the making: while the one in front tries again, and when it is given.

use memfit::data::{Buffers, Collate};

use super::gate::Gate;
use super::*;

/// Numbers as they are; a batch that is dropped in the making says so.
struct Watched {
    dropped: Arc<Gate>,
    /// The batch that begins with this number.
    first: i64,
}

struct Numbered {
    rows: Vec<Option<i64>>,
    dropped: Option<Arc<Gate>>,
}

impl Drop for Numbered {
    fn drop(&mut self) {
        if let Some(dropped) = &self.dropped {
            // Whoever does not wait for it is past by then.
            std::thread::sleep(Duration::from_millis(20));
            dropped.add();
        }
    }
}

impl Collate<i64> for Watched {
    type Partial = Numbered;
    type Batch = Tensor;

    fn begin(&self, rows: usize, first: &i64, _: &Buffers) -> Result<Numbered> {
        let dropped = (*first == self.first).then(|| self.dropped.clone());
        Ok(Numbered { rows: vec![None; rows], dropped })
    }

    fn put(&self, partial: &mut Numbered, row: usize, sample: i64) -> Result<()> {
        partial.rows[row] = Some(sample);
        Ok(())
    }

    fn end(&self, partial: &mut Numbered, _: &[usize]) -> Result<Tensor> {
        Ok(Tensor::from_slice(&partial.rows.iter().flatten().copied().collect::<Vec<_>>()))
    }
}

/// The numbers below 20; one that is of batch 3 or later says that it is read.
struct Telling {
    next: i64,
    ahead: Arc<Gate>,
}

impl memfit::data::Stream for Telling {
    type Record = i64;

    fn begin(&mut self, _: u64, _: Option<memfit::Mark>) -> Result<()> {
        self.next = 0;
        Ok(())
    }

    fn next(&mut self) -> Option<Result<(i64, memfit::data::Origin)>> {
        let number = self.next;
        self.next += 1;
        if number >= 6 {
            self.ahead.add();
        }
        (number < 20).then(|| Ok((number, memfit::data::Origin::default())))
    }
}

/// One worker runs out of memory in batch 0, and goes on to batch 2; the other one is in batch 1. Both stay there
/// until what is made ahead lets go. From then on nobody reads or makes batch 3 while batch 0 tries again.
#[test]
fn nothing_new_is_begun_while_a_batch_tries_again() {
    let _serial = serial();
    let (in_one, dropped, ahead) =
        (Arc::new(Gate::default()), Arc::new(Gate::default()), Arc::new(Gate::default()));
    let tries = AtomicUsize::new(0);
    let begun_ahead = Arc::new(AtomicUsize::new(0));
    let (let_go, begun) = (dropped.clone(), begun_ahead.clone());
    let stream = Telling { next: 0, ahead: ahead.clone() };
    let loader = Loader::stream(stream).map(move |n, _| {
        match n {
            0 if tries.fetch_add(1, Ordering::SeqCst) == 0 => {
                in_one.wait_for(1);
                let device = memfit::tch::Device::Cpu;
                return Err(Error::OutOfMemory { requested: None, live: None, limit: None, device });
            }
            0 => {
                let came = ahead.reaches(1, Duration::from_millis(300));
                begun.fetch_add(usize::from(came), Ordering::SeqCst);
            }
            3 => {
                in_one.add();
                let_go.wait_for(1);
            }
            4 => let_go.wait_for(1),
            6.. => ahead.add(),
            _ => {}
        }
        Ok(n)
    });
    let loader = loader.collate(Watched { dropped, first: 2 });
    let loader = loader.batch(2).workers(2).prefetch(6).build().unwrap();
    let all: Vec<u64> = loader.flat_map(|batch| ints(&batch.unwrap())).collect();
    assert_eq!(all, (0..20).collect::<Vec<_>>());
    assert_eq!(begun_ahead.load(Ordering::SeqCst), 0);
}

/// Its memory would else be alive beside that of the batches which follow it.
#[test]
fn a_batch_is_given_once_nothing_else_holds_what_it_was_made_of() {
    let _serial = serial();
    let dropped = Arc::new(Gate::default());
    let collate = Watched { dropped: dropped.clone(), first: 0 };
    let mut loader = Loader::new(numbers(3)).collate(collate).batch(1).workers(2).build().unwrap();
    assert_eq!(ints(&loader.next().unwrap().unwrap()), [0]);
    assert!(dropped.reaches(1, Duration::ZERO));
}
