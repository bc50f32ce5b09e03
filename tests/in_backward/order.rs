//! When gradients are final, and in which order parameters move.

use super::*;

#[test]
fn gradients_are_told_of_as_they_become_final() {
    let _guard = serial();
    let run = |wanted, master: bool| {
        let (vs, loss) = chain();
        let recorder = Recorder::new(&vs, wanted, |_| Ok(Heard::Noted));
        let log = recorder.log.clone();
        let builder = Stack::of(&vs, recorder).with(GradAccumulator::every(2));
        let builder = if master { builder.with(MasterWeights::fp32()) } else { builder };
        let mut training = builder.build().unwrap();
        for weight in [1, 1, 2, 2] {
            let _ = training.step_with(|| Ok(Loss::mean(loss(), weight))).unwrap();
        }
        log.lock().unwrap().join(", ")
    };
    let last = "c 1 ÷2, b 1 ÷2, a 1 ÷2, step";
    assert_eq!(run(GradientUse::AtUpdate, false), "step, step");
    assert_eq!(run(GradientUse::Announced, false), [last; 2].join(", "));
    assert_eq!(run(GradientUse::WhenFinal, false), [last; 2].join(", "));
    let each = format!("c 0 ÷2, b 0 ÷2, a 0 ÷2, {last}");
    assert_eq!(run(GradientUse::EachMicroBatch, false), [each.as_str(); 2].join(", "));
    // Gradients that go elsewhere after backward are not final in it.
    assert_eq!(run(GradientUse::Announced, true), "step, step");
}

/// Offloaded state is announced, and parameters move, in the order that gradients got final.
#[test]
fn offloaded_state_is_updated_in_the_order_of_backward() {
    let _guard = serial();
    let (vs, loss) = chain();
    let steps = Steps { inner: plain(&vs), order: Arc::default(), state: Vec::new() };
    let order = steps.order.clone();
    let away = CpuOffload::optimizer(steps).disk(std::env::temp_dir()).unwrap();
    let mut training = Stack::of(&vs, away).build().unwrap();
    let _ = training.step_with(|| Ok(Loss::of(loss()))).unwrap();
    assert_eq!(*order.lock().unwrap(), ["c", "b", "a"]);
}

/// Notes in which order its parameters move.
#[derive(Debug)]
struct Steps {
    inner: Sgd,
    order: Arc<Mutex<Vec<String>>>,
    state: Vec<Tensor>,
}

impl Optimizer for Steps {
    fn name(&self) -> String {
        "Steps".to_owned()
    }
    fn groups(&self) -> &[ParamGroup] {
        self.inner.groups()
    }
    fn groups_mut(&mut self) -> &mut [ParamGroup] {
        self.inner.groups_mut()
    }
    fn step(&mut self, update: &Update) -> Result<()> {
        self.inner.step(update)
    }
    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        self.inner.visit_state(visitor)
    }
    fn allocate(&mut self) -> Result<()> {
        self.state.resize_with(3, || Tensor::zeros([4], CPU));
        Ok(())
    }
    fn begin(&mut self, update: &Update) -> Result<()> {
        self.inner.begin(update)
    }
    fn step_parameter(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
        self.order.lock().unwrap().push(self.groups()[group].parameters()[index].name.clone());
        self.inner.step_parameter(group, index, update)
    }
    fn state_of(&mut self, _: usize, index: usize) -> Vec<&mut Tensor> {
        self.state.get_mut(index).into_iter().collect()
    }
    fn folds_divisor(&self) -> bool {
        true
    }
}

/// Weights that are offloaded are updated before they leave: one way home per step.
#[test]
fn offloaded_weights_move_before_they_leave() {
    let _guard = serial();
    let run = |early: bool| {
        let vs = nn::VarStore::new(Device::Cpu);
        memfit::tch::manual_seed(1);
        let layer = nn::linear(vs.root(), 8, 8, Default::default());
        let weights = vs.trainable_variables();
        let away = CpuOffload::parameters(layer, &weights).disk(std::env::temp_dir()).unwrap();
        let state = CpuOffload::optimizer(adamw(&vs)).resident().unwrap();
        let builder =
            if early { Stack::of(&vs, InBackward::new(state).unwrap()) } else { Stack::of(&vs, state) };
        let mut training = builder.build().unwrap();
        let moved = |away: &memfit::offload::ParameterOffload<nn::Linear>| {
            (away.moved().in_bytes, away.moved().out_bytes)
        };
        let mut traffic = Vec::new();
        for x in batches(&[4, 4, 4]).iter().map(|x| x.pad([0, 2], "constant", 0.0)) {
            let before = moved(&away);
            let _ = training.step_with(|| Ok(Loss::of(away.forward(&x).square().mean(Kind::Float)))).unwrap();
            let after = moved(&away);
            traffic.push((after.0 - before.0, after.1 - before.1));
        }
        drop((training, away));
        (copies(&weights), traffic)
    };
    let ((wanted, late), (got, early)) = (run(false), run(true));
    assert!(same(&wanted, &got));
    let bytes = 4 * (8 * 8 + 8);
    // Forward and backward bring them, the update finds them here.
    assert_eq!(late, [(3 * bytes, bytes); 3]);
    assert_eq!(early, [(2 * bytes, bytes); 3]);
}
