//! Two loaders in one training: batches that are pairs, and the position that the stack does not keep.

mod support;

use memfit::data::{DataPosition, InMemory, Loaded, Loader, Mark};
use memfit::optim::{Sgd, SgdConfig};
use memfit::snapshot::Extras;
use memfit::strategies::MicroBatcher;
use memfit::tch::{Kind, Tensor};
use memfit::{Error, Loss, Result, Snapshots, Stack, State, StepOutcome, Value};
use support::serial;

fn loader(len: i64, seed: u64, batch: usize) -> Loader<Tensor> {
    Loader::new(InMemory::of((0..len).collect())).shuffle(seed).batch(batch).build().unwrap()
}

fn numbers(batch: &Tensor) -> Vec<i64> {
    Vec::try_from(batch).unwrap()
}

type Pair = (Loaded<Tensor>, Loaded<Tensor>);

fn step(stack: &mut Stack, w: &Tensor, pair: &Pair, seen: &mut [Vec<i64>; 2]) -> Result<StepOutcome> {
    stack.step_batch(pair, |(labelled, unlabelled)| {
        seen[0].extend(numbers(labelled));
        seen[1].extend(numbers(unlabelled));
        let term =
            (w * labelled.to_kind(Kind::Float) + unlabelled.to_kind(Kind::Float) * w).mean(Kind::Float);
        Ok(Loss::mean(term, labelled.size()[0]))
    })
}

#[test]
fn a_pair_is_split_as_one_and_refused_where_its_parts_have_other_rows() {
    let _guard = serial();
    let (vs, w) = support::vector(1);
    let optimizer = Sgd::new(&vs, SgdConfig::default().lr(1.0)).unwrap();
    let mut stack = Stack::of(&vs, optimizer).with(MicroBatcher::new().start(2)).build().unwrap();
    let (mut labelled, mut unlabelled, mut wide) = (loader(20, 1, 4), loader(12, 2, 4), loader(20, 3, 8));
    let pair = (labelled.next().unwrap().unwrap(), unlabelled.next().unwrap().unwrap());
    let mut seen = [Vec::new(), Vec::new()];
    let outcome = step(&mut stack, &w, &pair, &mut seen).unwrap();
    assert_eq!(outcome.split().unwrap().micro_batches, 2);
    assert_eq!(seen, [numbers(&pair.0), numbers(&pair.1)], "each row once");
    let mean: i64 = seen.iter().flatten().sum();
    assert_eq!(w.double_value(&[0]), -(mean as f64) / 4.0, "the gradient of both means");
    assert_eq!(stack.data_position(), Some(labelled.data_position()));

    let uneven = (labelled.next().unwrap().unwrap(), wide.next().unwrap().unwrap());
    let error = step(&mut stack, &w, &uneven, &mut seen).unwrap_err();
    assert!(matches!(error, Error::Config { .. }) && error.to_string().contains("4 and 8 rows"), "{error}");
    assert_eq!(stack.data_position(), Some(pair.0.position));
}

fn marked() -> DataPosition {
    let mut position = DataPosition::at_epoch(3);
    (position.samples, position.order) = (5, u64::MAX - 1);
    position.mark = Some(Mark { file: 1, offset: 1 << 40, record: 4 });
    position
}

fn state_of(mut position: DataPosition) -> State {
    State::collect(|visitor| position.visit_state(visitor)).unwrap()
}

#[test]
fn a_position_of_ones_own_comes_back_with_the_snapshot() {
    let _guard = serial();
    let (vs, _w) = support::vector(1);
    let mut stack = Stack::of(&vs, Sgd::new(&vs, SgdConfig::default().lr(1.0)).unwrap()).build().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut snapshots = Snapshots::in_folder(folder.path()).unwrap();
    for saved in [marked(), DataPosition::at_epoch(2), DataPosition::default()] {
        snapshots.save(&mut stack, &Extras::new().entry("other", state_of(saved))).unwrap();
        let back = snapshots.latest().unwrap().unwrap().resume(&mut stack).unwrap();
        for mut position in [DataPosition::default(), marked()] {
            back.entries["other"].load(|visitor| position.visit_state(visitor)).unwrap();
            assert_eq!(position, saved);
        }
    }
}

#[test]
fn a_state_that_is_no_position_is_refused_and_nothing_moves() {
    let lies = [
        ("epoch", Value::Int(-1)),
        ("samples", Value::Float(5.0)),
        ("order", Value::Text("5".to_owned())),
        ("mark.known", Value::Int(2)),
        ("mark.offset", Value::Int(-1)),
    ];
    for (name, lie) in lies {
        let mut state = state_of(marked());
        assert!(state.get(name).is_some(), "{name}");
        state.insert(name, lie);
        let mut position = DataPosition::at_epoch(7);
        let loaded = state.load(|visitor| position.visit_state(visitor));
        assert!(matches!(loaded, Err(Error::State { .. })), "{name}");
        assert_eq!(position, DataPosition::at_epoch(7));
    }
}
