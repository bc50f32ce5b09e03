use tch::Tensor;

use super::{Accumulates, GroupOptions, Optimizer, ParamGroup, Share};
use crate::error::Result;
use crate::state::{Named, State, StateVisitor};
use crate::step::{Conflict, Exactness, GradientUse, Heard, Ready, Strategy, Update, WindowRule};

/// A boxed optimizer is one, so that a kind chosen at run time can be wrapped. Forwards every
/// method: a default of the trait would hide the inner one's answer.
impl Optimizer for Box<dyn Optimizer> {
    fn name(&self) -> String {
        (**self).name()
    }

    fn groups(&self) -> &[ParamGroup] {
        (**self).groups()
    }

    fn groups_mut(&mut self) -> &mut [ParamGroup] {
        (**self).groups_mut()
    }

    fn step(&mut self, update: &Update) -> Result<()> {
        (**self).step(update)
    }

    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        (**self).visit_state(visitor)
    }

    fn allocate(&mut self) -> Result<()> {
        (**self).allocate()
    }

    fn gradients(&self) -> GradientUse {
        (**self).gradients()
    }

    fn gradient_ready(&mut self, ready: &Ready) -> Result<Heard> {
        (**self).gradient_ready(ready)
    }

    fn exactness(&self, window: WindowRule) -> Exactness {
        (**self).exactness(window)
    }

    fn refuses_snapshot(&self) -> Option<String> {
        (**self).refuses_snapshot()
    }

    fn identity(&self) -> String {
        (**self).identity()
    }

    fn steps_parameters(&self) -> bool {
        (**self).steps_parameters()
    }

    fn accumulates(&self) -> Accumulates {
        (**self).accumulates()
    }

    fn accumulate(&mut self, group: usize, index: usize, update: &Update, share: Share) -> Result<()> {
        (**self).accumulate(group, index, update, share)
    }

    fn step_accumulated(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
        (**self).step_accumulated(group, index, update)
    }

    fn begin(&mut self, update: &Update) -> Result<()> {
        (**self).begin(update)
    }

    fn cancel(&mut self) -> bool {
        (**self).cancel()
    }

    fn step_parameter(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
        (**self).step_parameter(group, index, update)
    }

    fn state_of(&mut self, group: usize, index: usize) -> Vec<&mut Tensor> {
        (**self).state_of(group, index)
    }

    fn folds_divisor(&self) -> bool {
        (**self).folds_divisor()
    }

    fn has_state(&self) -> bool {
        (**self).has_state()
    }

    fn add_group(&mut self, parameters: Vec<Named>, options: GroupOptions) -> Result<()> {
        (**self).add_group(parameters, options)
    }

    fn conflict(&self, strategy: &dyn Strategy) -> Option<Conflict> {
        (**self).conflict(strategy)
    }

    fn zero_grad(&mut self) {
        (**self).zero_grad();
    }

    fn state_bytes(&mut self) -> u64 {
        (**self).state_bytes()
    }

    fn load(&mut self, state: &State) -> Result<()> {
        (**self).load(state)
    }
}
