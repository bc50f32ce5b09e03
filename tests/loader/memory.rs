//! Which batches are alive, and what becomes of one for which there is no memory.

use super::*;

/// Case 60.
#[test]
fn no_more_batches_are_alive_than_prefetch_and_two() {
    let _serial = serial();
    let row = 1 << 16;
    for (prefetch, workers) in [(1, 1), (2, 4), (4, 2)] {
        let loader = Loader::new(numbers(2000)).map(move |n, _| Ok(vec![n as u8; row]));
        let loader = loader.batch(2).workers(workers).prefetch(prefetch);
        let before = live();
        let mut loader = loader.build().unwrap();
        let bound = (prefetch + 2) * 2 * row;
        let (mut held, mut most) = (Vec::new(), 0);
        for index in 0..1000 {
            held.push(loader.next().unwrap().unwrap());
            // The one in the step, and the one looked ahead to.
            if held.len() == 2 {
                let first = held.remove(0);
                assert_eq!(values(&first.select(0, 1))[0] as u64, (2 * index - 1) as u64 % 256);
            }
            if index % 100 == 0 {
                std::thread::sleep(Duration::from_millis(5)); // they run ahead as far as they may
            }
            most = most.max(live() - before);
            assert!(live() - before <= bound as u64, "{} of {bound}", live() - before);
        }
        assert!(most > (prefetch * 2 * row) as u64, "{most} of {bound}");
        drop((held, loader));
        assert_eq!(live(), before, "all memory comes back");
    }
}

#[test]
fn a_batch_that_is_kept_never_changes() {
    let _serial = serial();
    let loader = Loader::new(numbers(400)).batch(4).workers(2).build().unwrap();
    let kept: Vec<Tensor> = loader
        .enumerate()
        .map(|(index, batch)| {
            let batch = batch.unwrap().batch;
            // Views, and graphs that saved a batch, hold it as well as itself.
            if index % 2 == 0 { batch.narrow(0, 0, 4) } else { batch }
        })
        .collect();
    for (index, batch) in kept.iter().enumerate() {
        let first = 4 * index as u64;
        assert_eq!(ints(batch), [first, first + 1, first + 2, first + 3]);
    }
}

#[test]
fn memory_that_ran_out_is_told_and_the_batch_is_not_lost() {
    let _serial = serial();
    let row = 1 << 20;
    for workers in [0, 2] {
        let loader = Loader::new(numbers(8)).map(move |n, _| Ok(vec![n as u8; row]));
        let mut loader = loader.batch(2).workers(workers).prefetch(1).build().unwrap();
        let first = loader.next().unwrap().unwrap();
        // Room for what there is, and not for another batch.
        until_others_wait();
        let limit = memfit::memory::Limit::new(live() + 1000).unwrap();
        let _kept = loader.next().filter(|_| workers > 0);
        for _ in 0..3 {
            let error = loader.next().unwrap().unwrap_err();
            assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
        }
        drop((limit, first));
        let rest: Vec<f64> = loader.map(|batch| values(&batch.unwrap().select(1, 0))[0]).collect();
        let wanted: &[f64] = if workers > 0 { &[4.0, 6.0] } else { &[2.0, 4.0, 6.0] };
        assert_eq!(rest, wanted);
    }
}

#[test]
fn what_ran_out_ahead_of_its_time_is_tried_again_before_it_is_told() {
    let _serial = serial();
    let row = 1 << 20;
    let loader = Loader::new(numbers(40)).map(move |n, _| Ok(vec![n as u8; row]));
    let mut loader = loader.batch(2).workers(2).prefetch(4).build().unwrap();
    // Three batches fit: those ahead run out of memory again and again, and none is told.
    let _limit = memfit::memory::Limit::new(live() + 3 * 2 * row as u64 + 1000).unwrap();
    let firsts: Vec<f64> = loader
        .by_ref()
        .map(|batch| {
            std::thread::sleep(Duration::from_millis(2));
            values(&batch.unwrap().select(1, 0))[0]
        })
        .collect();
    assert_eq!(firsts, (0..20).map(|index| f64::from(2 * index)).collect::<Vec<_>>());
}

#[test]
fn the_memory_of_a_batch_is_used_again_once_it_is_gone() {
    let _serial = serial();
    let stats = || memfit::memory::stats(memfit::tch::Device::Cpu).unwrap().allocations;
    let loader = Loader::new(numbers(4000)).map(|n, _| Ok((vec![n as f32; 100], n)));
    let mut loader = loader.batch(8).workers(2).prefetch(2).build().unwrap();
    let before = stats();
    let mut held = None;
    for batch in &mut loader {
        held = Some(batch.unwrap());
    }
    // Two tensors a batch; two batches ahead, two here.
    assert!(stats() - before <= 2 * 4, "{} allocations for 500 batches", stats() - before);
    assert_eq!(ints(&held.unwrap().batch.1), (3992..4000).collect::<Vec<_>>());
}

#[test]
fn whatever_allocation_fails_no_sample_is_lost() {
    let _serial = serial();
    for workers in [0, 2] {
        let mut failed = 0;
        for n in 1.. {
            let loader = Loader::new(numbers(20)).map(|n, _| {
                let own = Tensor::f_arange(4, (Kind::Int64, memfit::tch::Device::Cpu))?;
                Ok((vec![n; own.size()[0] as usize + n as usize % 3], n))
            });
            let pad = memfit::data::Pad::to_longest(-1);
            let loader = loader.batch(3).workers(workers).collate(pad).build().unwrap();
            let guard = memfit::memory::FailAt::nth(n).unwrap();
            let (mut seen, mut errors) = (Vec::new(), 0);
            for item in loader {
                match item {
                    Ok(batch) => seen.push(batch.batch.1.shallow_clone()),
                    Err(error) => {
                        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
                        errors += 1;
                    }
                }
            }
            drop(guard);
            let seen: Vec<u64> = seen.iter().flat_map(ints).collect();
            assert_eq!(seen, (0..20).collect::<Vec<_>>(), "the {n}-th allocation failed");
            // It is tried again before it is told.
            assert_eq!(errors, 0);
            let refused = memfit::memory::stats(memfit::tch::Device::Cpu).unwrap().failures;
            if refused == failed && n > 1 {
                break;
            }
            failed = refused;
        }
        assert!(failed > 20, "{failed}");
    }
}

#[test]
fn what_was_made_ahead_is_no_reason_for_a_batch_not_to_fit() {
    let _serial = serial();
    let row = 1 << 20;
    let loader = Loader::new(numbers(12)).map(move |n, _| {
        // The second batch comes last.
        std::thread::sleep(Duration::from_millis(if n % 3 == 1 { 20 } else { 0 }));
        Ok(vec![n as u8; row])
    });
    let mut loader = loader.batch(1).workers(3).prefetch(4).build().unwrap();
    let _limit = memfit::memory::Limit::new(live() + 2 * row as u64 + 1000).unwrap();
    let mut held = loader.next().unwrap().unwrap();
    for index in 1..12 {
        let next = loader.next().unwrap().unwrap();
        assert_eq!(values(&next.select(1, 7)), [f64::from(index)]);
        held = next;
    }
    drop(held);
}

#[test]
fn a_batch_whose_storage_was_exchanged_is_not_written_to_again() {
    let _serial = serial();
    let loader = Loader::new(numbers(60)).map(|n, _| Ok(vec![n; 64]));
    let mut kept = Vec::new();
    for batch in loader.batch(4).workers(2).build().unwrap() {
        let mut batch = batch.unwrap().batch;
        assert_eq!(batch.select(1, 63).max().int64_value(&[]), kept.len() as i64 * 4 + 3);
        // libtorch gives the storage, which the loader shares, other memory.
        let _ = batch.resize_([4096, 64]);
        kept.push(());
    }
    assert_eq!(kept.len(), 15);
}
