//! State, snapshots and what is promised of exactness.

use super::*;

#[test]
fn state_goes_on_to_the_bit_and_is_that_of_the_optimizer() {
    let _guard = serial();
    let rows = [4, 3, 5, 4];
    let straight = Model::new(false);
    let mut training = Stack::of(&straight.vs, adamw(&straight.vs)).build().unwrap();
    let _ = train(&mut training, &straight, &rows, |_| true).unwrap();
    let wanted = train(&mut training, &straight, &rows, |_| true).unwrap();

    let model = Model::new(false);
    let mut training = Stack::of(&model.vs, InBackward::new(adamw(&model.vs)).unwrap()).build().unwrap();
    let _ = train(&mut training, &model, &rows, |_| true).unwrap();
    let state = training.state().unwrap();
    drop(training);
    let other = Model::new(false);
    let mut training = Stack::of(&other.vs, InBackward::new(adamw(&other.vs)).unwrap()).build().unwrap();
    training.load_state(&state).unwrap();
    assert!(same(&wanted, &train(&mut training, &other, &rows, |_| true).unwrap()));
    // Without the wrapper it is the same state.
    let third = Model::new(false);
    let mut training = Stack::of(&third.vs, adamw(&third.vs)).build().unwrap();
    training.load_state(&state).unwrap();
    assert!(same(&wanted, &train(&mut training, &third, &rows, |_| true).unwrap()));
}

#[test]
fn a_window_that_is_in_the_momentum_refuses_a_snapshot() {
    let _guard = serial();
    let (vs, w) = vector(1);
    let optimizer = InBackward::new(heavy(&vs)).unwrap();
    let mut training = Stack::of(&vs, optimizer).with(GradAccumulator::every(2)).build().unwrap();
    assert_eq!(training.optimizer().refuses_snapshot(), None);
    let _ = training.step_with(|| Ok(Loss::mean(slope(&w, &[1.0]), 1))).unwrap();
    assert!(training.optimizer().refuses_snapshot().unwrap().contains("InBackward(Sgd)"));
    assert!(training.state().is_err());
    let _ = training.step_with(|| Ok(Loss::mean(slope(&w, &[1.0]), 1))).unwrap();
    assert_eq!(training.optimizer().refuses_snapshot(), None);
    assert!(training.state().is_ok());
}

#[test]
fn the_stack_says_what_it_keeps_of_exactness() {
    let _guard = serial();
    let (vs, _w) = vector(1);
    let exactness = |optimizer: Box<dyn Optimizer>, every: usize| {
        let optimizer = InBackward::new(optimizer).unwrap();
        Stack::of(&vs, optimizer).with(GradAccumulator::every(every)).build().unwrap().exactness()
    };
    assert_eq!(exactness(Box::new(heavy(&vs)), 2), Exactness::SummationOrder);
    assert_eq!(exactness(Box::new(heavy(&vs)), 1), Exactness::Bitwise);
    assert_eq!(exactness(Box::new(plain(&vs)), 2), Exactness::Bitwise);
}
