//! Batches of samples of unequal length, and by functions of the user's.

mod support;

use memfit::data::{Loader, LoaderBuilder, Pack, Pad, Padded, Random, Source};
use memfit::tch::{Kind, Tensor};
use memfit::{Batch, Error, Loss, Result};
use support::{serial, values};

/// Document i has the token i + 1, `self.0[i]` times.
struct Documents(Vec<usize>);

impl Source for Documents {
    type Sample = Vec<i64>;

    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn get(&self, index: u64, _: &mut Random) -> Result<Vec<i64>> {
        Ok(vec![index as i64 + 1; self.0[index as usize]])
    }
}

fn rows(tensor: &Tensor) -> Vec<Vec<i64>> {
    let width = tensor.size()[1].max(1) as usize;
    values(tensor).chunks(width).map(|row| row.iter().map(|value| *value as i64).collect()).collect()
}

#[test]
fn padding_fills_up_to_the_longest_or_to_a_length() {
    let _serial = serial();
    let load = |pad| Loader::new(Documents(vec![2, 0, 3])).batch(3).workers(2).collate(pad).build().unwrap();
    let batch = load(Pad::to_longest(0)).next().unwrap().unwrap();
    assert_eq!(rows(&batch.tokens), [[1, 1, 0], [0, 0, 0], [3, 3, 3]]);
    assert_eq!((batch.lengths.clone(), batch.tokens(), batch.batch.rows()), (vec![2, 0, 3], 5, 3));
    assert_eq!(rows(&batch.mask().unwrap()), [[1, 1, 0], [0, 0, 0], [1, 1, 1]]);
    let next = batch.next_token(-100).unwrap();
    assert_eq!(rows(&next.inputs), [[1, 1], [0, 0], [3, 3]]);
    assert_eq!(rows(&next.labels), [[1, -100], [-100, -100], [3, 3]]);
    assert_eq!((next.count, next.labels.kind()), (3, Kind::Int64));

    let batch = load(Pad::to(5, 9).multiple_of(4)).next().unwrap().unwrap();
    assert_eq!(rows(&batch.tokens)[0], [1, 1, 9, 9, 9, 9, 9, 9]);
    let part = batch.take_rows(2..3).unwrap();
    assert_eq!((part.lengths.clone(), part.tokens(), part.position), (vec![3], 3, batch.position));
    assert!(batch.batch.take_rows(2..4).is_err());
}

#[test]
fn a_batch_of_empty_lists_has_no_next_tokens() {
    let _serial = serial();
    let loader = Loader::new(Documents(vec![0, 0])).batch(2).collate(Pad::to_longest(0));
    let batch = loader.build().unwrap().next().unwrap().unwrap();
    let next = batch.next_token(-100).unwrap();
    assert_eq!((batch.tokens.size(), next.inputs.size(), next.count), (vec![2, 0], vec![2, 0], 0));
}

#[test]
fn what_is_longer_than_rows_is_told_or_cut() {
    let _serial = serial();
    let load = |pad| Loader::new(Documents(vec![2, 4])).batch(2).collate(pad).build().unwrap();
    let items: Vec<_> = load(Pad::to(3, 0)).collect();
    assert!(matches!(&items[0], Err(error) if error.to_string().starts_with("record 1: it has 4 elements")));
    assert_eq!(rows(&items[1].as_ref().unwrap().tokens), [[1, 1, 0]]);
    let batch = load(Pad::to(3, 0).cut_longer()).next().unwrap().unwrap();
    assert_eq!(
        (rows(&batch.tokens), batch.lengths.clone()),
        (vec![vec![1, 1, 0], vec![2, 2, 2]], vec![2, 3])
    );
}

#[test]
fn lists_with_something_beside_them_are_padded_too() {
    let _serial = serial();
    let loader = Loader::new(Documents(vec![1, 2])).map(|list, _| Ok((list.clone(), list.len() as f32)));
    let batch = loader.batch(2).collate(Pad::to_longest(0)).build().unwrap().next().unwrap().unwrap();
    let (padded, beside) = &batch.batch;
    assert_eq!((rows(&padded.tokens), values(beside)), (vec![vec![1, 0], vec![2, 2]], vec![1.0, 2.0]));
    assert_eq!(batch.tokens(), 3);
}

/// Documents with a label and a weight per token: the label is ten times the token, −100 at even places.
fn labelled(lengths: &[usize]) -> LoaderBuilder<u64, (Vec<i64>, Vec<i64>)> {
    Loader::new(Documents(lengths.to_vec())).batch(lengths.len()).map(|list, _| {
        let labels = list.iter().enumerate().map(|(at, token)| if at % 2 == 0 { -100 } else { 10 * token });
        Ok((list.clone(), labels.collect()))
    })
}

#[test]
fn several_lists_are_padded_alike_each_with_its_own_number() {
    let _serial = serial();
    for workers in [0, 2] {
        let loader = labelled(&[2, 4, 0]).workers(workers).collate(Pad::to_longest((0, -1)));
        let (padded, labels) = loader.build().unwrap().next().unwrap().unwrap().batch;
        assert_eq!(rows(&padded.tokens), [[1, 1, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0]]);
        assert_eq!(rows(&labels), [[-100, 10, -1, -1], [-100, 20, -100, 20], [-1, -1, -1, -1]]);
        assert_eq!((padded.lengths.clone(), padded.tokens()), (vec![2, 4, 0], 6));
        // The labels of what follows; the filling is none, whatever it is.
        let next = padded.next_label(&labels, -100).unwrap();
        assert_eq!(rows(&next.inputs), [[1, 1, 0], [2, 2, 2], [0, 0, 0]]);
        assert_eq!(rows(&next.labels), [[10, -100, -100], [20, -100, 20], [-100, -100, -100]]);
        assert_eq!(next.count, 3);
        assert!(matches!(padded.next_label(&labels.narrow(1, 0, 3), -100), Err(Error::Config { .. })));
    }
    let loader = labelled(&[3, 1]).map(|(tokens, labels), _| {
        let weights = vec![0.5_f32; tokens.len()];
        Ok(((tokens, labels, weights), 7_u8))
    });
    let pad = Pad::to(2, (0, -100, 0.0)).cut_longer();
    let batch = loader.collate(pad).build().unwrap().next().unwrap().unwrap();
    let ((padded, labels, weights), beside) = &batch.batch;
    assert_eq!(
        (rows(&padded.tokens), rows(labels)),
        (vec![vec![1, 1], vec![2, 0]], vec![vec![-100, 10], vec![-100; 2]])
    );
    assert_eq!((values(weights), weights.kind()), (vec![0.5, 0.5, 0.5, 0.0], Kind::Float));
    assert_eq!((values(beside), batch.tokens(), batch.rows()), (vec![7.0, 7.0], 3, 2));
    assert_eq!(batch.take_rows(1..2).unwrap().batch.0.1.size(), [1, 2]);
}

#[test]
fn lists_of_unequal_length_are_an_error_of_their_record() {
    let _serial = serial();
    let uneven = || {
        labelled(&[2, 3, 1]).map(|(tokens, mut labels), _| {
            labels.truncate(2);
            Ok((tokens, labels))
        })
    };
    let told = "record 1: its lists have 3 and 2 elements";
    let padded: Vec<_> = uneven().collate(Pad::to(2, (0, 0)).cut_longer()).build().unwrap().collect();
    assert!(padded[0].as_ref().unwrap_err().to_string().starts_with(told));
    assert_eq!(rows(&padded[1].as_ref().unwrap().batch.0.tokens), [[1, 1], [3, 0]]);
    let packed: Vec<_> = uneven().collate(Pack::to(4, (0, 0))).build().unwrap().collect();
    assert!(packed[0].as_ref().unwrap_err().to_string().starts_with(told));
    assert_eq!(rows(&packed[1].as_ref().unwrap().batch.0.tokens), [[1, 1, 3, 0]]);
}

#[test]
fn labels_are_packed_where_their_tokens_are() {
    let _serial = serial();
    let loader = labelled(&[3, 4, 2, 7]).collate(Pack::to(5, (0, -1)));
    let (packed, labels) = loader.build().unwrap().next().unwrap().unwrap().batch;
    assert_eq!(rows(&packed.tokens), [[1, 1, 1, 3, 3], [2, 2, 2, 2, 0], [4, 4, 4, 4, 4], [4, 4, 0, 0, 0]]);
    let wanted = [
        [-100, 10, -100, -100, 30],
        [-100, 20, -100, 20, -1],
        [-100, 40, -100, 40, -100],
        [40, -100, -1, -1, -1],
    ];
    assert_eq!(rows(&labels), wanted);
    let next = packed.next_label(&labels, -100).unwrap();
    let wanted = [[10, -100, -100, 30], [20, -100, 20, -100], [40, -100, 40, -100], [-100; 4]];
    assert_eq!((rows(&next.labels), next.count), (wanted.map(Vec::from).to_vec(), 6));
}

#[test]
fn packing_lays_documents_into_the_first_row_with_room() {
    let _serial = serial();
    let load = |lengths: &[usize], row| {
        let loader = Loader::new(Documents(lengths.to_vec())).batch(lengths.len());
        loader.collate(Pack::to(row, 0)).build().unwrap().next().unwrap().unwrap().batch
    };
    let batch = load(&[3, 4, 2, 0, 1], 5);
    assert_eq!(rows(&batch.tokens), [[1, 1, 1, 3, 3], [2, 2, 2, 2, 5]]);
    assert_eq!(rows(&batch.segments), [[1, 1, 1, 2, 2], [1, 1, 1, 1, 2]]);
    assert_eq!(rows(&batch.positions().unwrap()), [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]);
    assert_eq!((batch.rows(), batch.tokens()), (2, 10));
    let next = batch.next_token(-1).unwrap();
    assert_eq!(rows(&next.inputs), [[1, 1, 1, 3], [2, 2, 2, 2]]);
    assert_eq!(rows(&next.labels), [[1, 1, -1, 3], [2, 2, 2, -1]]);
    assert_eq!(next.count, 6);
    let same = batch.same_document().unwrap();
    assert_eq!(same.size(), [2, 5, 5]);
    assert_eq!(rows(&same.get(0))[3], [0, 0, 0, 1, 1]);

    // Longer than a row: cut into rows; what is left of a row is padding.
    let batch = load(&[7, 1], 3);
    assert_eq!(rows(&batch.tokens), [[1, 1, 1], [1, 1, 1], [1, 2, 0]]);
    let part = batch.take_rows(2..3).unwrap();
    assert_eq!(
        (part.documents.clone(), part.tokens(), part.next_token(-1).unwrap().count),
        (vec![vec![1, 1]], 2, 0)
    );
    assert_eq!(rows(&part.segments), [[1, 2, 0]]);
}

#[test]
fn a_packed_batch_without_tokens_is_an_error() {
    let _serial = serial();
    let loader = Loader::new(Documents(vec![0, 0, 1])).batch(2).collate(Pack::to(4, 0));
    let items: Vec<_> = loader.build().unwrap().collect();
    assert!(matches!(items[0], Err(Error::Data { .. })) && items[1].is_ok() && items.len() == 2);
}

#[test]
fn the_counted_tokens_make_padded_micro_batches_one_batch() {
    let _serial = serial();
    // The loss of a token is its logit's distance from the label; the mean is over labels that count.
    let (vs, w) = support::vector(8);
    let mut training = memfit::Stack::of(&vs, support::sgd(&vs))
        .with(memfit::strategies::GradAccumulator::every(2))
        .build()
        .unwrap();
    let mut loader =
        Loader::new(Documents(vec![2, 5, 3, 4])).batch(2).collate(Pad::to_longest(0)).build().unwrap();
    for micro in training.try_windows(&mut loader) {
        let outcome = training.step(micro.unwrap(), |batch| {
            let next = batch.next_token(-100)?;
            let counts = next.labels.f_ne(-100)?.f_to_kind(Kind::Float)?;
            let picked = w.f_index_select(0, &next.labels.f_clamp_min(0)?.f_view(-1)?)?.f_view_as(&counts)?;
            Ok(Loss::mean((picked * counts).sum(Kind::Float) / next.count as f64, next.count))
        });
        let _ = outcome.unwrap();
    }
    // Tokens 1 to 4 are labels 1, 4, 2 and 3 times of 10.
    let expected = [0.0, -0.1, -0.4, -0.2, -0.3, 0.0, 0.0, 0.0];
    for (value, wanted) in values(&w).iter().zip(expected) {
        assert!((value - wanted).abs() < 1e-6, "{:?}", values(&w));
    }
}

#[test]
fn a_function_of_all_samples_makes_a_batch() {
    let _serial = serial();
    let loader =
        Loader::new(Documents(vec![1, 2, 3])).batch(2).workers(2).collate_with(|samples: &[&Vec<i64>]| {
            let sums: Vec<i64> = samples.iter().map(|sample| sample.iter().sum()).collect();
            if sums == [9] { Err(Error::data("nine")) } else { Ok(Tensor::from_slice(&sums)) }
        });
    let items: Vec<_> = loader.build().unwrap().collect();
    assert_eq!(values(items[0].as_ref().unwrap()), [1.0, 4.0]);
    assert_eq!(items[1].as_ref().unwrap_err().to_string(), "the data: nine");
    assert_eq!(items.len(), 2);
}

/// Whoever comes first decides the shape of what is stacked beside the lists, but not one that is in no batch.
#[test]
fn a_bad_record_decides_nothing_for_the_others() {
    let _serial = serial();
    type Record = ((Vec<i64>, Vec<i64>), Vec<f32>);
    struct FirstIsBad;
    impl Source for FirstIsBad {
        type Sample = Record;

        fn len(&self) -> u64 {
            4
        }

        fn get(&self, index: u64, _: &mut Random) -> Result<Record> {
            Ok(match index {
                0 => ((vec![1, 2], vec![3]), vec![0.0; 7]),
                index => ((vec![index as i64], vec![-(index as i64)]), vec![index as f32; 2]),
            })
        }
    }
    for workers in [0, 2] {
        let loader = Loader::new(FirstIsBad).batch(4).workers(workers).collate(Pad::to_longest((0, 0)));
        let mut loader = loader.build().unwrap();
        let error = loader.next().unwrap().unwrap_err();
        assert!(matches!(&error, Error::Data { origin, .. } if origin.record == Some(0)), "{error}");
        let ((padded, labels), beside) = loader.next().unwrap().unwrap().batch;
        assert_eq!(values(&padded.tokens), [1.0, 2.0, 3.0]);
        assert_eq!(values(&labels), [-1.0, -2.0, -3.0]);
        assert_eq!(beside.size(), [3, 2]);
        assert!(loader.next().is_none());
    }
}

/// As above, where a record that does not fit is a panic.
#[test]
fn a_record_that_panics_decides_nothing_for_the_others() {
    let _serial = serial();
    struct Row(Vec<f32>);
    impl memfit::data::Sample for Row {
        type Batch = Tensor;
        type Rows = (usize, memfit::data::Rows);

        fn rows(&self, rows: usize, buffers: &memfit::data::Buffers) -> Result<Self::Rows> {
            Ok((self.0.len(), self.0.rows(rows, buffers)?))
        }

        fn put(&self, rows: &mut Self::Rows, row: usize) -> Result<()> {
            assert!(self.0.len() == 2 && rows.0 == 2, "a row of {} in a batch of {}", self.0.len(), rows.0);
            self.0.put(&mut rows.1, row)
        }

        fn batch(rows: &mut Self::Rows, present: &[usize]) -> Result<Tensor> {
            Vec::<f32>::batch(&mut rows.1, present)
        }
    }
    std::panic::set_hook(Box::new(|_| {}));
    let epochs = [0, 2].map(|workers| {
        let rows = Documents(vec![7, 2, 2, 3]);
        let loader = Loader::new(rows).map(|tokens, _| Ok(Row(vec![tokens[0] as f32; tokens.len()])));
        loader.batch(4).workers(workers).build().map(Iterator::collect::<Vec<_>>)
    });
    let _ = std::panic::take_hook();
    for items in epochs {
        let items = items.unwrap();
        let [Err(first), Err(last), Ok(batch)] = &items[..] else { panic!("{items:?}") };
        assert!(first.to_string().contains("a row of 7") && last.to_string().contains("a row of 3"));
        assert_eq!(values(&batch.batch), [2.0, 2.0, 3.0, 3.0]);
    }
}

#[test]
fn lengths_that_cannot_be_are_refused_when_the_loader_is_built() {
    let _serial = serial();
    let lists = || Loader::new(Documents(vec![1; 4])).batch(2);
    for pad in [Pad::to(usize::MAX, 0).multiple_of(2), Pad::to(usize::MAX, 0)] {
        assert!(matches!(lists().collate(pad).build(), Err(Error::Config { setting: "Pad", .. })));
    }
    // Of which one can be, and not two.
    let mut loader = lists().collate(Pad::to(i64::MAX as usize / 2 + 1, 0)).build().unwrap();
    assert!(matches!(loader.next(), Some(Err(Error::Config { setting: "Pad", .. }))));
    let flat = Padded { tokens: Tensor::from_slice(&[1_i64]), lengths: vec![1] };
    assert!(matches!(flat.next_token(0), Err(Error::Config { setting: "tokens", .. })));
}
