//! What becomes of a sample.

use super::*;

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
        let array = Array::from_vec(vec![2, 2], [n as f32, 1.0, 2.0, 3.0])?;
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
        let array = memfit::data::Array::from_vec(vec![1], [bf16::from_f32(x)])?;
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
