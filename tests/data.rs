//! The loader: order, batches, positions, failures, memory.

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use memfit::data::{Loaded, Loader, LoaderBuilder, Random, Source, Tail};
use memfit::tch::{Kind, Tensor};
use memfit::{Batch, DataPosition, Error, Result};
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

#[test]
fn without_a_shuffle_batches_are_the_source_in_its_order() {
    let _serial = serial();
    for workers in [0, 1, 3] {
        let mut loader = load(10, |loader| loader.batch(4).workers(workers));
        for _ in 0..2 {
            assert_eq!(epoch(&mut loader), [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8, 9]]);
        }
        assert_eq!(loader.epoch(), 2);
    }
    let mut loader = load(10, |loader| loader.batch(4).tail(Tail::Drop));
    assert_eq!(epoch(&mut loader), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!((loader.samples(), loader.epoch()), (Some(8), 1));
    assert_eq!(epoch(&mut load(0, |loader| loader.workers(2))), Vec::<Vec<u64>>::new());
}

/// Case 61.
#[test]
fn a_seed_and_an_epoch_make_one_order_for_any_number_of_workers() {
    let _serial = serial();
    let orders = |workers, seed| {
        let mut loader = load(103, |loader| loader.batch(8).shuffle(seed).workers(workers));
        [epoch(&mut loader), epoch(&mut loader)]
    };
    let first = orders(0, 5);
    assert!(orders(1, 5) == first && orders(4, 5) == first);
    assert_ne!(first[0], first[1]);
    assert_ne!(first, orders(0, 6));
    for order in &first {
        let mut all = order.concat();
        all.sort_unstable();
        assert_eq!(all, (0..103).collect::<Vec<_>>());
    }
    // An epoch on its own.
    let mut loader = load(103, |loader| loader.batch(8).shuffle(5));
    loader.seek(DataPosition::at_epoch(1)).unwrap();
    assert_eq!(epoch(&mut loader), first[1]);
}

/// Case 61.
#[test]
fn ranks_share_an_epoch_and_their_number_may_change_in_it() {
    let _serial = serial();
    let shared = |ranks: usize, from: DataPosition, take: usize| -> (Vec<u64>, DataPosition) {
        let mut all = Vec::new();
        let mut after = Vec::new();
        for rank in 0..ranks {
            let mut loader = load(60, |loader| loader.batch(3).shuffle(2).rank(rank, ranks).workers(2));
            loader.seek(from).unwrap();
            let batches: Vec<Loaded<Tensor>> =
                loader.by_ref().take(take).map(|batch| batch.unwrap()).collect();
            after.push(batches.last().map_or(from, |batch| batch.position));
            all.extend(batches.iter().flat_map(|batch| ints(batch)));
        }
        assert!(after.iter().all(|one| *one == after[0]), "{after:?}");
        (all, after[0])
    };
    for (first, second) in [(1, 2), (2, 1), (3, 4), (4, 1)] {
        let (mut all, position) = shared(first, DataPosition::default(), 2);
        assert_eq!((all.len(), position.samples), (6 * first, 6 * first as u64));
        let (rest, end) = shared(second, position, usize::MAX);
        assert_eq!(end.samples, 60);
        all.extend(rest);
        all.sort_unstable();
        assert_eq!(all, (0..60).collect::<Vec<_>>(), "{first} ranks, then {second}");
    }
}

#[test]
fn a_tail_that_ranks_cannot_share_evenly_is_kept_or_dropped() {
    let _serial = serial();
    let counts = |tail: Tail| -> Vec<Vec<usize>> {
        (0..3)
            .map(|rank| {
                let mut loader = load(22, |loader| loader.batch(3).rank(rank, 3).tail(tail));
                epoch(&mut loader).iter().map(Vec::len).collect()
            })
            .collect()
    };
    assert_eq!(counts(Tail::Keep), [vec![3, 3, 2], vec![3, 3, 1], vec![3, 3, 1]]);
    assert_eq!(counts(Tail::Drop), [[3, 3], [3, 3], [3, 3]]);
}

/// A step of all ranks takes 8 samples: of 25 the fourth has one, of the first rank.
#[test]
fn batches_of_an_epoch_are_counted_before_they_come() {
    let _serial = serial();
    for (len, world) in [(25, 2), (25, 1), (24, 2), (3, 2), (8, 3), (0, 2)] {
        for tail in [Tail::Keep, Tail::Drop] {
            for rank in 0..world {
                let mut loader = load(len, |loader| loader.batch(4).rank(rank, world).tail(tail).shuffle(1));
                let expected = loader.batches();
                assert_eq!(Some(epoch(&mut loader).len() as u64), expected, "{len} {world} {rank} {tail:?}");
            }
        }
    }
    let stream = memfit::data::Lines::of_reader(&b"1"[..]);
    let lengths = Loader::stream(stream).map(|line, _| Ok(line.bytes().len() as i64)).build().unwrap();
    assert_eq!(lengths.batches(), None);
}

#[test]
fn any_position_is_gone_on_from_with_any_batch_and_workers() {
    let _serial = serial();
    let whole: Vec<u64> = epoch(&mut load(50, |loader| loader.batch(7).shuffle(3))).concat();
    let mut loader = load(50, |loader| loader.batch(7).shuffle(3).workers(2).prefetch(4));
    let mut consumed = 0;
    for batch in &mut loader {
        let batch = batch.unwrap();
        consumed += batch.rows() as usize;
        assert_eq!(batch.position.samples as usize, consumed);
        for (size, workers) in [(7, 0), (4, 3)] {
            let mut resumed = load(50, |loader| loader.batch(size).shuffle(3).workers(workers));
            resumed.seek(batch.position).unwrap();
            assert_eq!(epoch(&mut resumed).concat(), whole[consumed..]);
            let again: BTreeSet<u64> = epoch(&mut resumed).concat().into_iter().collect();
            assert_eq!(again.len(), 50, "the next epoch is whole");
        }
    }
    assert_eq!(consumed, 50);
}

#[test]
fn seeking_back_and_forth_drops_what_was_made_ahead() {
    let _serial = serial();
    let mut loader = load(1000, |loader| loader.batch(10).shuffle(1).workers(3).prefetch(5));
    let first: Vec<_> = loader.by_ref().take(5).map(|batch| batch.unwrap()).collect();
    for _ in 0..50 {
        loader.seek(first[1].position).unwrap();
        let again = loader.next().unwrap().unwrap();
        assert_eq!(ints(&again), ints(&first[2]));
    }
}

#[test]
fn a_position_of_another_order_is_refused() {
    let _serial = serial();
    let mut loader = load(50, |loader| loader.batch(5).shuffle(3));
    let position = loader.next().unwrap().unwrap().position;
    let others = [
        load(50, |loader| loader.shuffle(4)),
        load(51, |loader| loader.shuffle(3)),
        load(50, |loader| loader),
    ];
    for mut other in others {
        assert!(matches!(other.seek(position), Err(Error::State { .. })));
        // It is where it was.
        assert_eq!(other.next().unwrap().unwrap().position.samples, 1);
        assert!(other.seek(position).is_err());
        assert_eq!(other.next().unwrap().unwrap().position.samples, 2);
    }
}

#[test]
fn a_transform_has_numbers_of_its_own_that_workers_do_not_change() {
    let _serial = serial();
    let drawn = |workers, batch, seed| -> Vec<f64> {
        let loader = Loader::new(numbers(40)).map(|_, random| Ok(random.uniform()));
        let loader = loader.seed(seed).batch(batch).workers(workers).build().unwrap();
        loader.flat_map(|batch| values(&batch.unwrap())).collect()
    };
    memfit::tch::manual_seed(1);
    let before = memfit::rng::Generators::capture(memfit::tch::Device::Cpu).unwrap();
    let first = drawn(0, 4, 9);
    assert!(drawn(3, 4, 9) == first && drawn(2, 7, 9) == first);
    assert_ne!(drawn(0, 4, 8), first);
    assert!(!before.moved_since(), "libtorch's generator belongs to the training");
}

#[test]
fn samples_of_tuples_arrays_and_lists_become_tensors() {
    let _serial = serial();
    use memfit::data::Array;
    let loader = Loader::new(numbers(5)).map(|n, _| {
        let array = Array::from_vec(vec![2, 2], &[n as f32, 1.0, 2.0, 3.0])?;
        Ok((array, vec![n, n + 1], [n as u8; 3], n % 2 == 0))
    });
    let mut loader = loader.batch(5).workers(2).build().unwrap();
    let batch = loader.next().unwrap().unwrap();
    let (array, list, bytes, even) = &batch.batch;
    assert_eq!((array.size(), array.kind()), (vec![5, 2, 2], Kind::Float));
    assert_eq!((list.size(), list.kind()), (vec![5, 2], Kind::Int64));
    assert_eq!((bytes.size(), bytes.kind()), (vec![5, 3], Kind::Uint8));
    assert_eq!((even.size(), even.kind()), (vec![5], Kind::Bool));
    assert_eq!(values(&array.select(0, 4)), [4.0, 1.0, 2.0, 3.0]);
    assert_eq!(values(list), [0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0]);
    assert_eq!(values(&even.to_kind(Kind::Int64)), [1.0, 0.0, 1.0, 0.0, 1.0]);
    assert_eq!(batch.take_rows(1..3).unwrap().batch.1.size(), [2, 2]);
}

#[test]
fn half_precision_numbers_keep_their_own_dtype() {
    let _serial = serial();
    use half::{bf16, f16};
    let loader = Loader::new(numbers(2)).map(|n, _| {
        let x = n as f32 + 0.5;
        let array = memfit::data::Array::from_vec(vec![1], &[bf16::from_f32(x)])?;
        Ok((f16::from_f32(x), bf16::from_f32(x), vec![bf16::from_f32(x); 2], array))
    });
    let batch = loader.batch(2).build().unwrap().next().unwrap().unwrap().batch;
    let kinds = [batch.0.kind(), batch.1.kind(), batch.2.kind(), batch.3.kind()];
    assert_eq!(kinds, [Kind::Half, Kind::BFloat16, Kind::BFloat16, Kind::BFloat16]);
    assert_eq!(values(&batch.0), values(&batch.1));
    assert_eq!((values(&batch.2), values(&batch.3)), (vec![0.5, 0.5, 1.5, 1.5], vec![0.5, 1.5]));
    let loader = Loader::new(numbers(1)).map(|_, _| Ok(vec![bf16::from_f32(2.0)]));
    let pad = memfit::data::Pad::to(2, bf16::from_f32(1.0));
    let padded = loader.collate(pad).build().unwrap().next().unwrap().unwrap().batch.tokens;
    assert_eq!((padded.kind(), values(&padded)), (Kind::BFloat16, vec![2.0, 1.0]));
}

#[test]
fn an_epoch_that_cannot_be_begun_is_told_and_ends_and_is_tried_again() {
    let _serial = serial();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lines");
    let lines =
        Loader::stream(memfit::data::Lines::of_file(&path)).map(|line, _| Ok(line.bytes().len() as i64));
    let mut loader = lines.shuffle_buffer(2).batch(2).workers(1).build().unwrap();
    for _ in 0..2 {
        assert!(matches!(loader.next(), Some(Err(Error::Io { .. }))));
        assert!(loader.next().is_none() && loader.epoch() == 0);
    }
    std::fs::write(&path, "1\n22\n333").unwrap();
    let lens: Vec<u64> = loader.flat_map(|batch| ints(&batch.unwrap())).collect();
    assert_eq!(lens, [1, 2, 3]);
}

#[test]
fn a_bad_record_is_an_error_in_its_place_and_the_others_of_its_batch_follow() {
    let _serial = serial();
    for workers in [0, 3] {
        let source = Numbers { len: 12, bad: |index| matches!(index, 5 | 6 | 8..=11) };
        let mut loader = Loader::new(source).batch(4).workers(workers).build().unwrap();
        let mut seen = Vec::new();
        for item in &mut loader {
            seen.push(match item {
                Ok(batch) => format!("{:?} {}", ints(&batch), batch.position.samples),
                Err(error) => error.to_string(),
            });
        }
        let bad = |record| format!("record {record}: it is bad");
        let wanted = [
            vec!["[0, 1, 2, 3] 4".to_owned(), bad(5), bad(6), "[4, 7] 8".to_owned()],
            (8..12).map(bad).collect(),
        ];
        assert_eq!(seen, wanted.concat());
        assert_eq!(loader.passed_over(), 0);
    }
}

#[test]
fn bad_records_are_passed_over_and_counted_up_to_a_number() {
    let _serial = serial();
    let source = || Numbers { len: 12, bad: |index| matches!(index, 5 | 6 | 8..=11) };
    let mut loader = Loader::new(source()).batch(4).workers(2).pass_over(6).build().unwrap();
    assert_eq!(epoch(&mut loader), [vec![0, 1, 2, 3], vec![4, 7]]);
    assert_eq!(epoch(&mut loader), [vec![0, 1, 2, 3], vec![4, 7]]);
    assert_eq!(loader.passed_over(), 12);
    let mut loader = Loader::new(source()).batch(4).pass_over(5).build().unwrap();
    let errors: Vec<String> = loader.by_ref().filter_map(|item| item.err()).map(|e| e.to_string()).collect();
    assert_eq!(errors, ["record 11: it is bad"]);
}

#[test]
fn a_panic_in_a_transform_is_an_error_of_its_record() {
    let _serial = serial();
    std::panic::set_hook(Box::new(|_| {}));
    let loader = Loader::new(numbers(6)).map(|n, _| if n == 3 { panic!("no {n}") } else { Ok(n) });
    let mut loader = loader.batch(2).workers(2).build().unwrap();
    let items: Vec<_> = loader.by_ref().collect();
    let _ = std::panic::take_hook();
    assert_eq!(items.len(), 4);
    match &items[1] {
        Err(error @ Error::Data { source: Some(source), .. }) => {
            assert_eq!(error.to_string(), "record 3: panic in a transform: no 3");
            assert!(matches!(**source, Error::Panic { .. }));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(ints(items[2].as_ref().unwrap()), [2]);
}

#[test]
fn a_sample_of_another_shape_is_told_and_left_out() {
    let _serial = serial();
    let loader = Loader::new(numbers(4)).map(|n, _| Ok(vec![n; if n == 2 { 3 } else { 2 }]));
    let mut loader = loader.batch(4).build().unwrap();
    let error = loader.next().unwrap().unwrap_err().to_string();
    assert!(error.starts_with("record 2: it has Int64 of shape [3] where others"), "{error}");
    assert_eq!(values(&loader.next().unwrap().unwrap()), [0.0, 0.0, 1.0, 1.0, 3.0, 3.0]);
}

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
        std::thread::sleep(Duration::from_millis(50));
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
fn a_loader_that_is_dropped_stops_its_threads_at_once() {
    let _serial = serial();
    struct Counted(Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }
    let alive = Arc::new(AtomicUsize::new(1));
    let counted = Counted(alive.clone());
    let loader = Loader::new(numbers(1_000_000)).map(move |n, _| {
        let _ = &counted;
        // The first batch is there at once, the second would take seconds.
        std::thread::sleep(Duration::from_millis(if n < 10_000 { 0 } else { 1 }));
        Ok(n)
    });
    let mut loader = loader.batch(10_000).workers(4).prefetch(2).build().unwrap();
    assert_eq!(loader.next().unwrap().unwrap().rows(), 10_000);
    let start = Instant::now();
    drop(loader);
    assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
    assert_eq!(alive.load(Ordering::SeqCst), 0, "no thread holds the transform any more");
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

#[test]
fn an_origin_that_panics_ends_no_loader() {
    struct Nameless;
    impl Source for Nameless {
        type Sample = i64;

        fn len(&self) -> u64 {
            4
        }

        fn get(&self, index: u64, _: &mut Random) -> Result<i64> {
            if index == 1 { Err(Error::data("bad")) } else { Ok(index as i64) }
        }

        fn origin(&self, _: u64) -> memfit::data::Origin {
            panic!("no name")
        }
    }
    let _serial = serial();
    std::panic::set_hook(Box::new(|_| {}));
    for workers in [0, 2] {
        let items: Vec<_> = Loader::new(Nameless).batch(2).workers(workers).build().unwrap().collect();
        assert_eq!(items.len(), 3);
        assert_eq!(items[0].as_ref().unwrap_err().to_string(), "the data: bad");
    }
    let _ = std::panic::take_hook();
}

#[test]
fn operators_in_a_transform_stay_on_their_thread() {
    let _serial = serial();
    memfit::tch::set_num_threads(2);
    let loader = Loader::new(numbers(8)).map(|n, _| {
        let sum = Tensor::f_ones([1 << 16], (Kind::Float, memfit::tch::Device::Cpu))?.f_sum(Kind::Float)?;
        assert_eq!(sum.f_double_value(&[])?, 65536.0);
        Ok((n, i64::from(memfit::tch::get_num_threads())))
    });
    for batch in loader.batch(2).workers(2).build().unwrap() {
        assert_eq!(values(&batch.unwrap().batch.1), [1.0, 1.0]);
    }
    assert_eq!(memfit::tch::get_num_threads(), 2, "the training's own are as before");
}

#[test]
fn the_first_row_decides_the_shape_whoever_comes_first() {
    let _serial = serial();
    for workers in [0, 1, 4] {
        let loader = Loader::new(numbers(8)).map(|n, _| {
            // The odd one comes first.
            std::thread::sleep(Duration::from_millis(if n == 1 { 0 } else { 5 }));
            Ok(vec![n; if n == 1 { 3 } else { 2 }])
        });
        let mut loader = loader.batch(8).workers(workers).pass_over(9).build().unwrap();
        let batch = loader.next().unwrap().unwrap();
        assert_eq!(ints(&batch.select(1, 0)), [0, 2, 3, 4, 5, 6, 7]);
        assert_eq!(loader.passed_over(), 1);
    }
}

#[test]
fn what_is_no_records_own_is_never_passed_over() {
    let _serial = serial();
    let loader = Loader::new(numbers(4)).batch(2).pass_over(u64::MAX);
    let mut loader =
        loader.collate_with(|_: &[&i64]| -> Result<Tensor> { Err(Error::data("no")) }).build().unwrap();
    assert_eq!(loader.by_ref().filter(Result::is_err).count(), 2);
    assert_eq!(loader.passed_over(), 0);
    let packed = Loader::new(numbers(4)).map(|n, _| Ok(vec![n])).collate(memfit::data::Pack::to(0, 0_i64));
    assert!(matches!(packed.build(), Err(Error::Config { .. })));
}

#[test]
fn bad_records_are_counted_by_epoch_also_after_a_seek() {
    let _serial = serial();
    let source = || Numbers { len: 12, bad: |index| index < 6 };
    let mut loader = Loader::new(source()).batch(4).pass_over(6).build().unwrap();
    assert!(loader.by_ref().all(|batch| batch.is_ok()));
    let mut next = loader.position();
    next.epoch = 5;
    loader.seek(next).unwrap();
    assert!(loader.by_ref().all(|batch| batch.is_ok()));
    assert_eq!((loader.passed_over(), loader.epoch()), (12, 6));
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

#[test]
fn dropping_does_not_wait_for_a_shuffle_buffer_to_fill() {
    let _serial = serial();
    let slow = Slow { next: 0, ends: u64::MAX };
    let loader = Loader::stream(slow).shuffle_buffer(500).shuffle(1).batch(250).workers(1);
    let mut loader = loader.prefetch(3).build().unwrap();
    // The first block is given out and the second one, of half a second, has begun.
    assert!(loader.next().unwrap().is_ok() && loader.next().unwrap().is_ok());
    std::thread::sleep(Duration::from_millis(20));
    let start = Instant::now();
    drop(loader);
    assert!(start.elapsed() < Duration::from_millis(200), "{:?}", start.elapsed());
}

#[test]
fn the_records_before_a_fatal_error_come_before_it() {
    let _serial = serial();
    for workers in [0, 2] {
        let stream = Loader::stream(Slow { next: 0, ends: 5 }).batch(3).workers(workers);
        let mut loader = stream.build().unwrap();
        assert_eq!(ints(&loader.next().unwrap().unwrap()), [1, 2, 3]);
        assert_eq!(ints(&loader.next().unwrap().unwrap()), [4, 5]);
        assert!(matches!(loader.next(), Some(Err(Error::Io { .. }))));
        assert!(loader.next().is_none());
    }
}

#[test]
fn a_loader_that_waits_for_a_pipe_still_answers() {
    let _serial = serial();
    let (reader, writer) = std::io::pipe().unwrap();
    let lines = memfit::data::Lines::of_pipe(reader);
    let loader = Loader::stream(lines).map(|line, _| Ok(line.bytes().len() as i64));
    let mut loader = loader.batch(1).workers(1).build().unwrap();
    std::io::Write::write_all(&mut &writer, b"abc\n").unwrap();
    assert_eq!(ints(&loader.next().unwrap().unwrap()), [3]);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(loader.samples(), None);
    // A refused seek touches nothing.
    let mut position = loader.position();
    position.order = 12;
    assert!(loader.seek(position).is_err());
    std::io::Write::write_all(&mut &writer, b"ab\n").unwrap();
    assert_eq!(ints(&loader.next().unwrap().unwrap()), [2]);
}
