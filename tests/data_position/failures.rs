//! What failed, was split, ran again or was skipped.

use super::*;

/// Fails where it is told to.
#[derive(Debug)]
struct Fails {
    backward: Arc<AtomicBool>,
    update: Arc<AtomicBool>,
}

impl Strategy for Fails {
    fn place(&self) -> Place {
        Place::Average
    }

    fn backward(&mut self, pass: &mut Backward<'_>, next: NextBackward<'_>) -> Result<()> {
        if self.backward.swap(false, Ordering::Relaxed) {
            return Err(Error::config("planned", "fails"));
        }
        next(pass)
    }

    fn update(&mut self, phase: &mut UpdatePhase<'_>, next: NextUpdate<'_>) -> Result<Verdict> {
        if self.update.swap(false, Ordering::Relaxed) {
            return Err(Error::config("planned", "fails"));
        }
        next(phase)
    }
}

fn failing(micros: usize) -> (Run, Arc<AtomicBool>, Arc<AtomicBool>) {
    let (vs, w) = support::vector(2);
    let (backward, update) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
    let fails = Fails { backward: backward.clone(), update: update.clone() };
    let optimizer = AdamW::new(&vs, AdamWConfig::default().lr(0.1)).unwrap();
    let builder = Stack::of(&vs, optimizer).with(GradAccumulator::every(micros)).with(fails);
    let run = Run { w, stack: builder.build().unwrap(), seen: Vec::new(), _vs: vs };
    (run, backward, update)
}

fn next<I: Iterator<Item = Result<Loaded<Tensor>>>>(
    windows: &mut Windows<I>,
) -> memfit::Micro<Loaded<Tensor>> {
    windows.next().unwrap().unwrap()
}

#[test]
fn a_lost_window_was_not_consumed_and_can_be_had_again() {
    let _guard = serial();
    let mut straight = failing(3).0;
    straight.train(&mut loader(0), 9);

    let (mut run, backward, _) = failing(3);
    let mut data = loader(2);
    run.train(&mut data, 3);
    data.seek(run.stack.data_position().unwrap()).unwrap();
    let mut windows = run.stack.try_windows(&mut data);
    let _ = run.step(next(&mut windows)).unwrap();
    assert_eq!(run.at(), at(0, 4 * BATCH));
    // A failed forward loses its micro-batch, and the window stays.
    let micro = next(&mut windows);
    let refused = |_: &Loaded<Tensor>| Err(Error::config("planned", "fails"));
    assert!(run.stack.step(&micro, refused).is_err());
    assert_eq!(run.at(), at(0, 4 * BATCH));
    // A failed backward loses the window.
    backward.store(true, Ordering::Relaxed);
    let micro = next(&mut windows);
    assert!(matches!(run.step(micro), Err(Error::WindowLost { micro: 1, .. })));
    assert_eq!(run.at(), at(0, 3 * BATCH));
    drop(windows);

    data.seek(run.stack.data_position().unwrap()).unwrap();
    run.seen.truncate(3);
    run.train(&mut data, 6);
    assert_eq!(run.seen, straight.seen);
    assert_eq!(difference_of(&run.stack.state().unwrap(), &straight.stack.state().unwrap()), None);
}

#[test]
fn a_first_micro_batch_that_fails_consumes_nothing() {
    let _guard = serial();
    let (mut run, backward, _) = failing(2);
    let mut data = loader(0);
    let mut windows = run.stack.try_windows(&mut data);
    let micro = next(&mut windows);
    backward.store(true, Ordering::Relaxed);
    assert!(run.step(micro).is_err());
    assert_eq!(run.at(), None);
    let _ = run.step(next(&mut windows)).unwrap();
    assert_eq!(run.at(), at(0, 2 * BATCH), "the ones after it count on");
    run.stack.discard().unwrap();
    assert_eq!(run.at(), None);
}

#[test]
fn a_failed_update_consumes_nothing_of_its_window() {
    let _guard = serial();
    let (mut run, _, update) = failing(2);
    let mut data = loader(0);
    let mut windows = run.stack.try_windows(&mut data);
    for _ in 0..3 {
        let _ = run.step(next(&mut windows)).unwrap();
    }
    update.store(true, Ordering::Relaxed);
    let micro = next(&mut windows);
    assert!(run.step(micro).is_err());
    assert_eq!(run.at(), at(0, 2 * BATCH));
}

#[test]
fn a_batch_that_is_split_is_consumed_once_it_returns() {
    let _guard = serial();
    let mut run = Run::new(MicroBatcher::new().start(4));
    let mut data = loader(2);
    for done in 1..=3 {
        let batch = data.next().unwrap().unwrap();
        let mut micros = 0;
        let Run { w, stack, .. } = &mut run;
        let failed = stack.step_batch(&batch, |micro| {
            micros += 1;
            if micros == 2 { Err(Error::config("planned", "fails")) } else { Ok(loss(w, micro)) }
        });
        assert!(failed.is_err() && micros == 2);
        assert_eq!(run.at(), if done == 1 { None } else { at(0, (done - 1) * BATCH) });
        let Run { w, stack, .. } = &mut run;
        let mut rows = Vec::new();
        let outcome = stack.step_batch(&batch, |micro| {
            rows.extend(numbers(micro));
            Ok(loss(w, micro))
        });
        assert_eq!(outcome.unwrap().split().unwrap().micro_batches, 2);
        assert_eq!(rows, numbers(&batch));
        assert_eq!(run.at(), at(0, done * BATCH));
    }
}

#[test]
fn a_batch_that_ran_again_is_consumed_once() {
    let _guard = serial();
    let mut run = Run::new(MicroBatcher::new());
    let mut data = loader(0);
    let batch = data.next().unwrap().unwrap();
    let Run { w, stack, .. } = &mut run;
    let outcome = stack.step_batch(&batch, |micro| {
        if micro.rows() > 2 {
            let text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes.";
            return Err(memfit::tch::TchError::Torch(text.to_owned()).into());
        }
        Ok(loss(w, micro))
    });
    assert!(outcome.unwrap().split().unwrap().retries > 0);
    assert_eq!(run.at(), at(0, BATCH));
}

#[test]
fn a_skipped_step_consumed_its_data() {
    let _guard = serial();
    let mut run = Run::new(AmpScaler::fp16());
    let mut data = loader(0);
    let mut windows = run.stack.try_windows(&mut data);
    let micro = next(&mut windows);
    let Run { w, stack, .. } = &mut run;
    let outcome = stack.step(micro, |batch| Ok(Loss::mean(w.sum(Kind::Float) * f64::INFINITY, batch.rows())));
    assert!(matches!(outcome.unwrap(), StepOutcome::Skipped { .. }));
    assert_eq!(run.at(), at(0, BATCH));
}
