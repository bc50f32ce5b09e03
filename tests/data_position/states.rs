//! A position in a state: put, taken away, refused.

use super::*;

fn marked() -> DataPosition {
    let mut position = DataPosition::default();
    (position.epoch, position.samples, position.order) = (3, 5, u64::MAX - 1);
    position.mark = Some(Mark { file: 1, offset: 1 << 40, record: 4 });
    position
}

#[test]
fn a_state_puts_a_position_where_none_is_and_none_where_one_is() {
    let _guard = serial();
    let (mut with, mut without) = (Run::every(2), Run::every(2));
    with.stack.consumed(marked());
    let w = &with.w;
    let batch = Tensor::ones([2], (Kind::Int64, Device::Cpu));
    let _ = with.stack.step_with(|| Ok(loss(w, &batch))).unwrap();
    let mut later = marked();
    later.samples += 2;
    with.stack.consumed(later);
    let (some, none) = (with.stack.state().unwrap(), without.stack.state().unwrap());

    without.stack.load_state(&some).unwrap();
    assert_eq!(without.stack.data_position(), Some(later));
    without.stack.discard().unwrap();
    assert_eq!(without.stack.data_position(), Some(marked()));
    with.stack.load_state(&none).unwrap();
    assert_eq!(with.stack.data_position(), None);

    let folder = tempfile::tempdir().unwrap();
    let mut snapshots = Snapshots::in_folder(folder.path()).unwrap();
    snapshots.save(&mut without.stack, &Extras::new()).unwrap();
    let back = snapshots.latest().unwrap().unwrap().resume(&mut with.stack).unwrap();
    assert_eq!(back.data, Some(marked()));
    with.stack.load_state(&none).unwrap();
    snapshots.save(&mut with.stack, &Extras::new()).unwrap();
    let back = snapshots.latest().unwrap().unwrap().resume(&mut without.stack).unwrap();
    assert_eq!((back.data, without.stack.data_position()), (None, None));
}

#[test]
fn a_position_that_none_can_be_is_refused_and_nothing_moves() {
    let _guard = serial();
    let mut run = Run::every(2);
    run.stack.consumed(marked());
    let before = run.stack.state().unwrap();
    let lie = |state: &mut State, name: &str, value| {
        assert!(state.get(name).is_some(), "{name}");
        state.insert(name, value);
    };
    let lies = [
        ("data.known", Value::Int(2)),
        ("data.known", Value::Float(1.0)),
        ("data.known", Value::Int(0)), // the rest is unknown then
        ("data.epoch", Value::Int(-1)),
        ("data.samples", Value::Float(5.0)),
        ("data.order", Value::Text("5".to_owned())),
        ("data.mark.known", Value::Int(-1)),
        ("data.mark.offset", Value::Int(i64::MIN)),
    ];
    for (name, value) in lies {
        let mut state = run.stack.state().unwrap();
        lie(&mut state, name, value);
        let Err(Error::State { problems }) = run.stack.load_state(&state) else { panic!("{name}") };
        assert!(problems.iter().all(|problem| problem.contains("data.")), "{problems:?}");
        assert_eq!(difference_of(&run.stack.state().unwrap(), &before), None);
        assert_eq!(run.stack.data_position(), Some(marked()));
    }
    let mut state = run.stack.state().unwrap();
    state.remove("data.samples");
    assert!(run.stack.load_state(&state).is_err());
}

#[test]
fn a_tuple_has_the_position_of_its_first_part_that_has_one() {
    let _guard = serial();
    let tensor = || Tensor::ones([2], (Kind::Int64, Device::Cpu));
    let known = |samples: u64| {
        let mut position = marked();
        position.samples = samples;
        Loaded { batch: tensor(), position }
    };
    let samples = |position: Option<DataPosition>| position.map(|position| position.samples);
    assert_eq!(samples((tensor(), vec![tensor()]).data_position()), None);
    assert_eq!(samples((tensor(), known(4)).data_position()), Some(4));
    assert_eq!(samples((tensor(), (known(5), known(6)), known(7)).data_position()), Some(5));
    assert_eq!(samples(known(8).take_rows(0..1).unwrap().data_position()), Some(8));
}
