//! Of several ranks each has something in each place, or they would wait for each other for ever.

use super::*;

const LEN: u64 = 32;

/// A whole batch of 4 of rank 1 of 2, and one record of its next batch.
fn bad(index: u64) -> bool {
    matches!(index, 9 | 11 | 13 | 15 | 17)
}

fn of_source(batch: usize, rank: usize, world: usize, most: u64) -> Loader<Tensor> {
    let loader = Loader::new(Numbers { len: LEN, bad }).batch(batch).rank(rank, world).tail(Tail::Drop);
    loader.pass_over(most).workers(2).build().unwrap()
}

fn of_stream(batch: usize, rank: usize, world: usize, most: u64) -> Loader<Tensor> {
    let stream = Following(Numbers { len: LEN, bad }, 0);
    let loader = Loader::stream(stream).batch(batch).rank(rank, world).tail(Tail::Drop);
    loader.pass_over(most).workers(2).build().unwrap()
}

type Load = fn(usize, usize, usize, u64) -> Loader<Tensor>;

#[test]
fn a_rank_whose_batch_is_all_passed_over_says_so_in_its_place() {
    let _serial = serial();
    for (load, batch, rank) in [of_source as Load, of_stream]
        .into_iter()
        .flat_map(|load| [(load, 1, 0), (load, 1, 1), (load, 4, 0), (load, 4, 1)])
    {
        let mut loader = load(batch, rank, 2, u64::MAX);
        let mut passed = 0;
        for step in 0..LEN / (2 * batch as u64) {
            let from = step * 2 * batch as u64;
            let mine: Vec<u64> = (from + rank as u64..from + 2 * batch as u64).step_by(2).collect();
            let good: Vec<u64> = mine.iter().copied().filter(|index| !bad(*index)).collect();
            passed += (mine.len() - good.len()) as u64;
            match loader.next().unwrap() {
                Ok(found) => assert!(ints(&found) == good && !good.is_empty(), "{good:?}"),
                Err(Error::EmptyBatch { records, rank: of, world }) => {
                    assert!(good.is_empty(), "{good:?}");
                    assert_eq!((records, of, world), (batch as u64, rank, 2));
                }
                Err(error) => panic!("{error}"),
            }
            assert_eq!(loader.data_position().samples, from + 2 * batch as u64);
            assert_eq!(loader.passed_over(), passed);
        }
        assert!(loader.next().is_none());
    }
}

#[test]
fn records_that_are_told_are_no_batch_either() {
    let _serial = serial();
    for load in [of_source as Load, of_stream] {
        let mut loader = load(4, 1, 2, 2);
        let items: Vec<Result<Loaded<Tensor>>> = loader.by_ref().collect();
        let kinds: Vec<char> = items
            .iter()
            .map(|item| match item {
                Ok(_) => 'b',
                Err(Error::Data { .. }) => 'd',
                Err(Error::EmptyBatch { records: 4, rank: 1, world: 2 }) => 'e',
                Err(error) => panic!("{error}"),
            })
            .collect();
        // Two of the bad ones are passed over, two told, and their batch does not come; then the fifth is told.
        assert_eq!(kinds, ['b', 'd', 'd', 'e', 'd', 'b', 'b']);
        assert_eq!(loader.passed_over(), 2);
    }
}

#[test]
fn one_process_alone_goes_on_with_the_next_batch() {
    let _serial = serial();
    for load in [of_source as Load, of_stream] {
        let batches = epoch(&mut load(1, 0, 1, u64::MAX));
        assert_eq!(batches.concat(), (0..LEN).filter(|index| !bad(*index)).collect::<Vec<_>>());
    }
}
