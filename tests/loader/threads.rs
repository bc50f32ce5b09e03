//! Threads: what they leave alone, and how they end.

use super::*;

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
        // The first batch is there at once, the second would take two minutes.
        std::thread::sleep(Duration::from_millis(if n < 10_000 { 0 } else { 50 }));
        Ok(n)
    });
    let mut loader = loader.batch(10_000).workers(4).prefetch(2).build().unwrap();
    assert_eq!(loader.next().unwrap().unwrap().rows(), 10_000);
    let start = Instant::now();
    drop(loader);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    assert_eq!(alive.load(Ordering::SeqCst), 0, "no thread holds the transform any more");
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
fn dropping_does_not_wait_for_a_shuffle_buffer_to_fill() {
    let _serial = serial();
    let (mut loader, _) = in_its_second_block();
    assert!(loader.next().unwrap().is_ok());
    let start = Instant::now();
    drop(loader);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn going_elsewhere_does_not_wait_for_a_shuffle_buffer_to_fill() {
    let _serial = serial();
    let (mut loader, begun) = in_its_second_block();
    let start = Instant::now();
    let mut nowhere = loader.data_position();
    nowhere.mark = Some(memfit::Mark { record: 1, ..Default::default() });
    assert!(loader.seek(nowhere).is_err());
    // It is where it was: the other half of the first block comes.
    assert_eq!(loader.next().unwrap().unwrap().position.samples, BLOCK);
    loader.seek(DataPosition::default()).unwrap();
    loader.seek(DataPosition::default()).unwrap();
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    assert_eq!(begun.load(Ordering::SeqCst), 4);
    let mut found = [(); 2].map(|()| ints(&loader.next().unwrap().unwrap())).concat();
    found.sort_unstable();
    assert_eq!(found, (0..BLOCK).collect::<Vec<_>>());
}

const BLOCK: u64 = 64;

/// Of a stream that takes a minute for its second block of [`BLOCK`] records; a half of the first one was given, and
/// the second has begun. Beside it, how often the stream began.
fn in_its_second_block() -> (Loader<Tensor>, Arc<AtomicUsize>) {
    struct Slower(u64, Arc<AtomicUsize>, Arc<AtomicUsize>);
    impl memfit::data::Stream for Slower {
        type Record = i64;

        fn begin(&mut self, _: u64, _: Option<memfit::Mark>) -> Result<()> {
            self.0 = 0;
            self.2.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }

        fn next(&mut self) -> Option<Result<(i64, memfit::data::Origin)>> {
            let at = self.0;
            self.0 += 1;
            if at >= BLOCK {
                self.1.store(1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_secs(1));
            }
            Some(Ok((at as i64, memfit::data::Origin::default())))
        }
    }
    let (entered, begun) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let stream = Slower(0, entered.clone(), begun.clone());
    let loader =
        Loader::stream(stream).shuffle_buffer(BLOCK as usize).shuffle(1).batch(BLOCK as usize / 2).workers(1);
    let mut loader = loader.prefetch(3).build().unwrap();
    assert!(loader.next().unwrap().is_ok());
    until("the second block", || entered.load(Ordering::SeqCst) == 1);
    (loader, begun)
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
    let mut position = loader.data_position();
    position.order = 12;
    assert!(loader.seek(position).is_err());
    std::io::Write::write_all(&mut &writer, b"ab\n").unwrap();
    assert_eq!(ints(&loader.next().unwrap().unwrap()), [2]);
}
