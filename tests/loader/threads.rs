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
