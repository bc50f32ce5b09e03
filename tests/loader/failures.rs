//! Records that cannot be used, and what is told of them.

use super::*;

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
    let epoch =
        |workers| Loader::new(Nameless).batch(2).workers(workers).build().map(Iterator::collect::<Vec<_>>);
    let epochs = [0, 2].map(epoch);
    let _ = std::panic::take_hook();
    for items in epochs {
        let items = items.unwrap();
        assert_eq!(items.len(), 3);
        assert_eq!(items[0].as_ref().unwrap_err().to_string(), "the data: bad");
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
    let mut next = loader.data_position();
    next.epoch = 5;
    loader.seek(next).unwrap();
    assert!(loader.by_ref().all(|batch| batch.is_ok()));
    assert_eq!((loader.passed_over(), loader.epoch()), (12, 6));
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
fn what_comes_again_after_a_seek_is_passed_over_once() {
    let _serial = serial();
    let numbers = Numbers { len: 6, bad: |index| index == 2 || index == 3 };
    for workers in [0, 2] {
        let loader = Loader::new(Numbers { ..numbers }).batch(4).workers(workers).pass_over(1);
        let mut loader = loader.build().unwrap();
        assert!(loader.next().unwrap().is_err(), "the second one");
        let position = loader.data_position();
        assert_eq!((position.samples, loader.passed_over()), (0, 0), "their batch was not given yet");
        loader.seek(position).unwrap();
        assert!(loader.next().unwrap().is_err());
        assert_eq!(ints(&loader.next().unwrap().unwrap()), [0, 1]);
        assert_eq!(loader.passed_over(), 1);
        // The epoch's one was passed over, wherever it goes on.
        let mut position = loader.data_position();
        position.samples = 2;
        loader.seek(position).unwrap();
        assert_eq!(loader.by_ref().filter(Result::is_err).count(), 2);
        assert_eq!(loader.passed_over(), 1);
    }
}

#[test]
fn a_panic_of_what_is_dropped_reaches_the_consumer() {
    let _serial = serial();
    /// A batch in the making that cannot be dropped in peace.
    struct Broken(Vec<i64>);
    impl Drop for Broken {
        fn drop(&mut self) {
            panic!("not dropped");
        }
    }
    struct Breaks;
    impl memfit::data::Collate<i64> for Breaks {
        type Partial = Broken;
        type Batch = Tensor;

        fn begin(&self, _: usize, _: &i64, _: &memfit::data::Buffers) -> Result<Broken> {
            Ok(Broken(Vec::new()))
        }

        fn put(&self, partial: &mut Broken, _: usize, sample: i64) -> Result<()> {
            partial.0.push(sample);
            Ok(())
        }

        fn end(&self, partial: &mut Broken, _: &[usize]) -> Result<Tensor> {
            Ok(Tensor::from_slice(&partial.0))
        }
    }
    std::panic::set_hook(Box::new(|_| {}));
    let epochs = [0, 2].map(|workers| {
        let loader = Loader::new(numbers(2)).batch(2).workers(workers).collate(Breaks).build().unwrap();
        support::waiting::ends("the epoch", move || loader.collect::<Vec<_>>())
    });
    let _ = std::panic::take_hook();
    for items in epochs {
        let [Ok(batch), Err(error)] = &items[..] else { panic!("{items:?}") };
        assert_eq!(batch.size(), [2]);
        assert!(error.to_string().contains("not dropped"), "{error}");
    }
}
