//! What transforms may make of a record: arrays and tensors.

mod support;

use half::{bf16, f16};
use memfit::data::{Array, InMemory, Loader, Random};
use memfit::rng::Generators;
use memfit::tch::kind::Element;
use memfit::tch::{Device, Kind, Tensor};
use memfit::{Error, Result};
use support::{serial, values};

fn back<T: Element + Copy + Send + Sync + PartialEq + std::fmt::Debug + 'static>(
    kind: Kind,
    numbers: [T; 3],
) {
    let array = Array::from_vec(vec![3, 1], numbers.to_vec()).unwrap();
    assert_eq!((array.kind(), array.shape()), (kind, &[3, 1][..]));
    assert_eq!(array.numbers::<T>().unwrap(), numbers);
    // Out of bytes that lie anywhere, as those of a file.
    let array = Array::from_bytes(kind, vec![3], array.bytes().to_vec()).unwrap();
    assert_eq!(array.numbers::<T>().unwrap(), numbers);
}

#[test]
fn an_array_gives_its_numbers_back_in_every_type() {
    back(Kind::Uint8, [0_u8, 7, 255]);
    back(Kind::Int8, [-128_i8, 0, 127]);
    back(Kind::Int16, [i16::MIN, 1, i16::MAX]);
    back(Kind::Int, [i32::MIN, 1, i32::MAX]);
    back(Kind::Int64, [i64::MIN, 1, i64::MAX]);
    back(Kind::Float, [f32::MIN, -0.5, f32::INFINITY]);
    back(Kind::Double, [f64::MIN, -0.5, f64::INFINITY]);
    back(Kind::Half, [0.5, -1.0, 3.0].map(f16::from_f32));
    back(Kind::BFloat16, [0.5, -1.0, 3.0].map(bf16::from_f32));
    back(Kind::Bool, [true, false, true]);
    let little = [1_u8, 0, 0, 0, 0, 0, 0, 0x80];
    let array = Array::from_bytes(Kind::Int64, vec![], little.to_vec()).unwrap();
    assert_eq!(array.numbers::<i64>().unwrap(), [i64::from_ne_bytes(little)]);
    assert_eq!(Array::from_vec::<f32>(vec![0, 4], []).unwrap().numbers::<f32>().unwrap(), [0.0; 0]);
}

#[test]
fn numbers_of_another_type_are_told_with_both() {
    let array = Array::from_vec(vec![1], [1.0_f32]).unwrap();
    let told = |error: Error| error.to_string();
    let wanted = "the data: it has Float numbers where Int64 is read";
    assert_eq!(array.numbers::<i64>().map_err(told), Err(wanted.to_owned()));
    // As many bytes each, and not the same numbers.
    assert!(array.numbers::<i32>().is_err());
    let half = Array::from_vec(vec![1], [f16::from_f32(1.0)]).unwrap();
    assert!(half.numbers::<bf16>().is_err() && half.numbers::<f16>().is_ok());
}

#[derive(Clone, Copy)]
#[repr(u8)]
enum Switch {
    On = 1,
}

// SAFETY: a byte, as that kind.
unsafe impl Element for Switch {
    const KIND: Kind = Kind::Uint8;
    const ZERO: Self = Self::On;
}

#[test]
fn patterns_that_are_no_value_are_refused() {
    let bools = Array::from_bytes(Kind::Bool, vec![2], vec![1, 2]);
    assert!(matches!(bools, Err(Error::Data { .. })));
    assert!(Array::from_bytes(Kind::Bool, vec![2], vec![1, 0]).is_ok());
    let bytes = Array::from_vec(vec![1], [7_u8]).unwrap();
    assert!(matches!(bytes.numbers::<Switch>(), Err(Error::Data { .. })));
    assert!(Array::from_vec(vec![3], [1_i64, 2]).is_err() && Array::from_vec(vec![-2], [1_i64, 2]).is_err());
}

#[test]
fn a_vector_becomes_an_array_where_it_lies() {
    let numbers = vec![0.5_f64; 1000];
    let place = numbers.as_ptr().addr();
    let array = Array::from_vec(vec![10, 100], numbers).unwrap();
    assert_eq!((array.bytes().as_ptr().addr(), array.bytes().len()), (place, 8000));
    let clone = array.clone();
    assert!(clone == array && clone.bytes().as_ptr().addr() == place);
}

/// One batch of what a transform makes of the numbers below `rows`.
fn batch(
    rows: i64,
    workers: usize,
    transform: impl Fn(i64, &mut Random) -> Result<Tensor> + Send + Sync + 'static,
) -> Tensor {
    let loader = Loader::new(InMemory::of((0..rows).collect())).map(transform).batch(rows as usize);
    loader.workers(workers).build().unwrap().next().unwrap().unwrap().batch
}

#[test]
fn tensors_of_any_strides_become_rows() {
    let _serial = serial();
    let made: [fn(i64) -> Tensor; 10] = [
        |n| Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]) + n,
        |n| (Tensor::arange(6, (Kind::Int64, Device::Cpu)) + n).view([2, 3]).tr(),
        |n| Tensor::from(n as f32).expand([3, 2], false),
        |n| (Tensor::arange(9, (Kind::Int16, Device::Cpu)) + n).slice(0, 1, 9, 3),
        |n| (Tensor::arange(24, (Kind::Double, Device::Cpu)) + n).view([2, 3, 4]).permute([2, 0, 1]),
        |n| (Tensor::arange(4, (Kind::Float, Device::Cpu)) + n).to_kind(Kind::BFloat16),
        |n| Tensor::from(n % 2 == 0),
        |n| Tensor::zeros([0, n.min(0) + 3], (Kind::Float, Device::Cpu)),
        // A negative and a conjugate that are only marks on the bytes.
        |n| Tensor::complex(&Tensor::from(1.0_f32), &Tensor::from(n as f32 + 0.5)).conj().imag(),
        |n| Tensor::complex(&Tensor::from(1.0_f32), &Tensor::from(n as f32 + 0.5)).conj(),
    ];
    assert!(made[8](1).is_neg() && made[9](1).is_conj() && !made[1](1).is_contiguous());
    for (which, make) in made.into_iter().enumerate() {
        let expected = Tensor::stack(&(0..5).map(make).collect::<Vec<_>>(), 0);
        for workers in [0, 2] {
            let batch = batch(5, workers, move |n, _| Ok(make(n)));
            assert_eq!((batch.size(), batch.kind()), (expected.size(), expected.kind()), "tensor {which}");
            assert!(batch.is_contiguous() && batch.equal(&expected), "tensor {which}");
        }
    }
    // Beside others, as any sample.
    let loader = Loader::new(InMemory::of(vec![1_i64, 2])).map(|n, _| Ok((Tensor::from(n) * 2, n)));
    let (doubled, n) = loader.batch(2).build().unwrap().next().unwrap().unwrap().batch;
    assert_eq!((values(&doubled), values(&n)), (vec![2.0, 4.0], vec![1.0, 2.0]));
}

#[test]
fn a_tensor_whose_bytes_are_not_its_numbers_is_told_and_left_out() {
    let _serial = serial();
    let plain = || Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
    let bad: [fn(Tensor) -> Tensor; 6] = [
        |t| t.to_sparse_sparse_dim(2),
        |t| t.to_sparse_csr(None),
        |t| t.to_mkldnn(),
        |t| t.quantize_per_tensor(0.1, 0, Kind::QInt8),
        |t| t.set_requires_grad(true) * 2,
        |_| Tensor::new(),
    ];
    let words = ["sparse", "sparse", "sparse", "sparse", "gradient", "undefined"];
    for (make, word) in bad.into_iter().zip(words) {
        // Also where it comes first.
        for place in [0, 1] {
            let transform = move |n, _: &mut Random| Ok(if n == place { make(plain()) } else { plain() });
            let loader = Loader::new(InMemory::of(vec![0, 1, 2])).map(transform).batch(3);
            let items: Vec<_> = loader.build().unwrap().collect();
            let error = items[0].as_ref().unwrap_err().to_string();
            assert!(error.starts_with(&format!("record {place}: ")) && error.contains(word), "{error}");
            assert_eq!(items[1].as_ref().unwrap().size(), [2, 2, 2]);
        }
    }
    let transform = |n: i64, _: &mut Random| Ok(Tensor::zeros([n.min(1)], (Kind::Float, Device::Cpu)));
    let loader = Loader::new(InMemory::of(vec![0, 1])).map(transform).batch(2);
    let error = loader.build().unwrap().next().unwrap().unwrap_err().to_string();
    assert!(error.starts_with("record 1: it has Float of shape [1] where others"), "{error}");
}

/// What `map` says of libtorch's operators in a transform.
#[test]
fn random_tensors_of_a_transform_come_from_its_sample() {
    let _serial = serial();
    let ours = |_, random: &mut Random| {
        let numbers: Vec<f32> = (0..4).map(|_| random.normal() as f32).collect();
        Ok(Tensor::from_slice(&numbers).view([2, 2]).tr() * 0.5)
    };
    let before = Generators::capture(Device::Cpu).unwrap();
    let first = batch(8, 0, ours);
    assert!(batch(8, 3, ours).equal(&first) && !before.moved_since());
    let _ = batch(8, 2, |_, _| Ok(Tensor::rand([2], (Kind::Float, Device::Cpu))));
    assert!(before.moved_since(), "libtorch has one generator for all threads");
}
