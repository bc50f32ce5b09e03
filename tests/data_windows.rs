//! Windows over data that fails: errors in their place, the end of the last window, memory that
//! runs out, and loops that are left early.

mod support;

use std::iter;

use memfit::data::{Loader, Origin, Random, Source, Stream};
use memfit::memory::Limit;
use memfit::optim::{InBackward, Sgd, SgdConfig};
use memfit::snapshot::Extras;
use memfit::strategies::GradAccumulator;
use memfit::tch::{Kind, TchError, Tensor, nn};
use memfit::{Batch, Error, Loss, Mark, Micro, Result, Snapshots, Stack};
use support::{live, serial, values};

struct Run {
    w: Tensor,
    stack: Stack,
    /// What returned: each micro-batch's first number, and whether it ended its window.
    seen: Vec<(i64, bool)>,
    _vs: nn::VarStore,
}

impl Run {
    /// With `whole`, windows are looked ahead to as a whole.
    fn new(micros: usize, whole: bool) -> Self {
        let (vs, w) = support::vector(1);
        let config = SgdConfig::default().lr(0.001).momentum(0.5);
        let sgd = Sgd::new(&vs, config).unwrap();
        let builder = match whole {
            true => Stack::of(&vs, InBackward::new(sgd).unwrap()),
            false => Stack::of(&vs, sgd),
        };
        let stack = builder.with(GradAccumulator::every(micros)).build().unwrap();
        Self { w, stack, seen: Vec::new(), _vs: vs }
    }

    fn step<B: Batch>(&mut self, micro: Micro<B>, tensor: fn(&B) -> &Tensor) {
        let Self { w, stack, .. } = self;
        let first = values(tensor(&micro.batch))[0] as i64;
        let last = micro.last;
        let outcome = stack.step(micro, |batch| {
            let x = tensor(batch).to_kind(Kind::Float);
            Ok(Loss::mean((&*w * x).mean(Kind::Float), batch.rows()))
        });
        assert_eq!(outcome.unwrap().stepped(), last, "batch {first}");
        self.seen.push((first, last));
    }

    /// Goes over all batches; the errors, as texts, with how many micro-batches came before each.
    fn train<B: Batch>(
        &mut self,
        batches: impl Iterator<Item = Result<B>>,
        tensor: fn(&B) -> &Tensor,
    ) -> Vec<(usize, String)> {
        let mut errors = Vec::new();
        for micro in self.stack.try_windows(batches) {
            match micro {
                Ok(micro) => self.step(micro, tensor),
                Err(error) => errors.push((self.seen.len(), error.to_string())),
            }
        }
        errors
    }
}

/// The windows of these batches, of which the last one is short.
fn windows_of(numbers: &[i64], micros: usize) -> Vec<(i64, bool)> {
    let last = |at: usize| at % micros == micros - 1 || at + 1 == numbers.len();
    numbers.iter().enumerate().map(|(at, number)| (*number, last(at))).collect()
}

fn batch(number: i64) -> Tensor {
    Tensor::from_slice(&[number])
}

fn out_of_memory() -> Error {
    let text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes.";
    let error: Error = TchError::Torch(text.to_owned()).into();
    assert!(error.is_out_of_memory());
    error
}

#[test]
fn any_batches_may_be_bad_and_the_last_good_one_ends_the_last_window() {
    let _guard = serial();
    for (bad, micros, whole) in
        (0..1_u32 << 5).flat_map(|bad| [(bad, 2, false), (bad, 3, false), (bad, 2, true), (bad, 3, true)])
    {
        let is_bad = |number: i64| bad >> number & 1 == 1;
        let batches = (0..5).map(|number| match is_bad(number) {
            true => Err(Error::data(format!("{number}"))),
            false => Ok(batch(number)),
        });
        let mut run = Run::new(micros, whole);
        let errors = run.train(batches, |batch| batch);
        let good: Vec<i64> = (0..5).filter(|number| !is_bad(*number)).collect();
        assert_eq!(run.seen, windows_of(&good, micros), "bad {bad:b}, every {micros}, whole {whole}");
        // Each has come in its place.
        let places = (0..5).filter(|number| is_bad(*number));
        let places = places.map(|number| good.iter().filter(|good| **good < number).count());
        assert!(errors.iter().map(|(place, _)| *place).eq(places), "{bad:b}: {errors:?}");
        assert!(run.stack.flush().unwrap().is_none(), "no window is open");
    }
}

/// Records of which those from `bad` on, or of a stream all from there on, cannot be had.
#[derive(Clone, Copy)]
struct Ends {
    bad: u64,
    fatal: bool,
    at: u64,
}

impl Source for Ends {
    type Sample = i64;

    fn len(&self) -> u64 {
        20
    }

    fn get(&self, index: u64, _: &mut Random) -> Result<i64> {
        if index < self.bad { Ok(index as i64) } else { Err(Error::data("bad")) }
    }
}

impl Stream for Ends {
    type Record = i64;

    fn begin(&mut self, _: u64, from: Option<Mark>) -> Result<()> {
        self.at = from.map_or(0, |mark| mark.record);
        Ok(())
    }

    fn next(&mut self) -> Option<Result<(i64, Origin)>> {
        let at = self.at;
        self.at += 1;
        let failed = || match self.fatal {
            true => Error::config("planned", "the stream breaks"),
            false => Error::data("bad"),
        };
        let read = if at < self.bad { Ok((at as i64, Origin::record(at))) } else { Err(failed()) };
        (at < 20).then_some(read)
    }

    fn mark(&self) -> Option<Mark> {
        Some(Mark { record: self.at, ..Mark::default() })
    }
}

/// Five batches of four: the last is bad as a whole, or the stream breaks there.
#[test]
fn what_fails_at_the_epochs_end_leaves_no_window_open() {
    let _guard = serial();
    let ends = |fatal| Ends { bad: 16, fatal, at: 0 };
    for (name, wanted) in [("source", 4), ("stream", 4), ("fatal", 1)] {
        for (micros, whole) in [(2, false), (3, false), (3, true)] {
            let mut loader = match name {
                "source" => Loader::new(ends(false)).batch(4).workers(2).build(),
                _ => Loader::stream(ends(name == "fatal")).batch(4).workers(2).build(),
            }
            .unwrap();
            let mut run = Run::new(micros, whole);
            let errors = run.train(&mut loader, |loaded| &loaded.batch);
            assert_eq!(errors.len(), wanted, "{name}: {errors:?}");
            assert!(errors.iter().all(|(place, _)| *place == 4), "{name}: {errors:?}");
            assert_eq!(run.seen, windows_of(&[0, 4, 8, 12], micros), "{name}");
            let position = run.stack.data_position().unwrap();
            assert_eq!((position.epoch, position.samples), (0, 16), "{name}");

            // A run that resumes has no window either, and hears of what is left.
            let folder = tempfile::tempdir().unwrap();
            let mut snapshots = Snapshots::in_folder(folder.path()).unwrap();
            snapshots.save(&mut run.stack, &Extras::new()).unwrap();
            let mut resumed = Run::new(micros, whole);
            let back = snapshots.latest().unwrap().unwrap().resume(&mut resumed.stack).unwrap();
            assert!(resumed.stack.flush().unwrap().is_none());
            loader.seek(back.data.unwrap()).unwrap();
            let again = resumed.train(&mut loader, |loaded| &loaded.batch);
            assert_eq!((again.len(), resumed.seen.len()), (wanted, 0), "{name}");
            assert_eq!(values(&resumed.w), values(&run.w));
        }
    }
}

/// Its batch is still to come, so it ends nothing, and comes once as often as it was given.
#[test]
fn memory_that_runs_out_n_times_is_told_n_times_and_costs_no_batch() {
    let _guard = serial();
    for (n, at, whole) in [0, 1, 5]
        .into_iter()
        .flat_map(|n| (0..=5).flat_map(move |at| [false, true].map(|whole| (n, at, whole))))
    {
        let failures = (0..n).map(|_| Err(out_of_memory()));
        let batches = (0..at).map(|number| Ok(batch(number)));
        let batches = batches.chain(failures).chain((at..6).map(|number| Ok(batch(number))));
        let mut run = Run::new(3, whole);
        let errors = run.train(batches, |batch| batch);
        assert_eq!(run.seen, windows_of(&[0, 1, 2, 3, 4, 5], 3), "{n} times at {at}");
        // A window that is counted cannot begin before.
        let place = if whole { at - at % 3 } else { at };
        assert!(errors.iter().map(|(place, _)| *place as i64).eq(iter::repeat_n(place, n)), "{errors:?}");
    }
}

/// Records beside which libtorch's tensors are large.
struct Large;

const ROW: usize = 1 << 16;

impl Source for Large {
    type Sample = Vec<i64>;

    fn len(&self) -> u64 {
        5
    }

    fn get(&self, index: u64, _: &mut Random) -> Result<Vec<i64>> {
        Ok(vec![index as i64; ROW])
    }
}

#[test]
fn a_window_that_memory_has_no_room_for_is_told_at_each_call_until_it_has() {
    let _guard = serial();
    for workers in [0, 2] {
        let mut loader = Loader::new(Large).workers(workers).build().unwrap();
        let mut run = Run::new(3, true);
        let limit = Limit::new(live() + 2 * 8 * ROW as u64 + 10_000).unwrap();
        let mut windows = run.stack.try_windows(&mut loader);
        for _ in 0..4 {
            assert!(windows.next().unwrap().unwrap_err().is_out_of_memory());
        }
        drop(limit);
        for micro in windows {
            run.step(micro.unwrap(), |loaded| &loaded.batch);
        }
        assert_eq!(run.seen, windows_of(&[0, 1, 2, 3, 4], 3));
    }
}

#[test]
fn errors_without_end_are_handed_on() {
    let _guard = serial();
    for whole in [false, true] {
        let run = Run::new(3, whole);
        let endless = iter::repeat_with(|| Err(Error::data("again")));
        let batches = (0..2).map(|number| Ok(batch(number))).chain(endless);
        let mut windows = run.stack.try_windows(batches);
        let errors = windows.by_ref().take(10_000).filter(Result::is_err).count();
        assert!(errors >= 9_998, "{errors}");
    }
}

/// The numbers of batches, as far as `take` says, of one loop.
fn take(run: &mut Run, loader: &mut Loader<Tensor>, most: usize) {
    for micro in run.stack.try_windows(loader).take(most) {
        run.step(micro.unwrap(), |loaded| &loaded.batch);
    }
}

fn five() -> Loader<Tensor> {
    Loader::new(Ends { bad: 20, fatal: false, at: 0 }).batch(4).workers(2).prefetch(3).build().unwrap()
}

#[test]
fn a_loop_left_early_goes_on_where_the_loader_is_sought_back_or_its_iterator_kept() {
    let _guard = serial();
    let all = [0, 4, 8, 12, 16];
    for (left, whole) in (1..5).flat_map(|left| [(left, false), (left, true)]) {
        // Left alone, the loader is beyond what was looked ahead to.
        let (mut run, mut loader) = (Run::new(1, false), five());
        take(&mut run, &mut loader, left);
        let ahead = loader.data_position().samples - run.stack.data_position().unwrap().samples;
        assert_eq!(ahead, if left < 5 { 4 } else { 0 });

        // Back to what was consumed; an open window's micro-batches come again.
        let (mut run, mut loader) = (Run::new(2, whole), five());
        take(&mut run, &mut loader, left);
        if left % 2 == 1 {
            if whole {
                // Momentum has taken the first half: the window cannot be dropped.
                continue;
            }
            run.stack.discard().unwrap();
        }
        let consumed = run.stack.data_position();
        assert_eq!(consumed.map_or(0, |position| position.samples) as usize, (left - left % 2) * 4);
        loader.seek(consumed.unwrap_or_default()).unwrap();
        run.seen.truncate(left - left % 2);
        take(&mut run, &mut loader, usize::MAX);
        assert_eq!(run.seen, windows_of(&all, 2), "left after {left}");
    }
    for (left, whole) in (0..5).flat_map(|left| [(left, false), (left, true)]) {
        let (mut run, mut loader) = (Run::new(2, whole), five());
        let mut windows = run.stack.try_windows(&mut loader);
        for most in [left, 1, usize::MAX] {
            for micro in windows.by_ref().take(most) {
                run.step(micro.unwrap(), |loaded| &loaded.batch);
            }
        }
        assert_eq!(run.seen, windows_of(&all, 2), "left after {left}");
    }
}
