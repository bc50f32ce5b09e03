use crate::error::{Error, Result};
use crate::ffi;
use crate::optim::{Optimizer, ParamGroup};
use crate::state::StateVisitor;
use crate::step::{GradientUse, Heard, Ready, Update};

/// Stands in for an optimizer while passes are only tried: it hears of gradients as the other one
/// does and drops those that the other one would use up, and nothing moves.
#[derive(Debug)]
pub(super) struct StandIn {
    name: String,
    groups: Vec<ParamGroup>,
    wanted: GradientUse,
}

impl StandIn {
    pub(super) fn of(optimizer: &dyn Optimizer) -> Result<Self> {
        let same = |group: &ParamGroup| {
            ParamGroup::new(group.parameters().to_vec(), group.initial_lr(), group.weight_decay)
        };
        let groups = optimizer.groups().iter().map(same).collect::<Result<_>>()?;
        Ok(Self { name: optimizer.name(), groups, wanted: optimizer.gradients() })
    }
}

impl Optimizer for StandIn {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn groups(&self) -> &[ParamGroup] {
        &self.groups
    }

    fn groups_mut(&mut self) -> &mut [ParamGroup] {
        &mut self.groups
    }

    fn gradients(&self) -> GradientUse {
        self.wanted
    }

    fn gradient_ready(&mut self, ready: &Ready) -> Result<Heard> {
        let parameters = self.groups.get(ready.group).map(ParamGroup::parameters);
        if self.wanted.changes_in_backward()
            && let Some(parameter) = parameters.and_then(|parameters| parameters.get(ready.index))
        {
            ffi::grad::take(&parameter.tensor);
        }
        Ok(Heard::Noted)
    }

    /// Nothing is divided, since nothing moves.
    fn folds_divisor(&self) -> bool {
        true
    }

    fn step(&mut self, _: &Update) -> Result<()> {
        Err(Error::CallOrder {
            call: "Optimizer::step",
            state: "while a step is only estimated".to_owned(),
            remedy: "wait for the estimate's end",
        })
    }

    fn visit_state(&mut self, _: &mut StateVisitor<'_>) -> Result<()> {
        Ok(())
    }
}
