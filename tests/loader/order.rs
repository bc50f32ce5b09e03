//! Order, ranks, positions.

use super::*;

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
