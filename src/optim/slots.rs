//! Parameter groups with the state of each parameter: what the built-in optimizers share.

use std::collections::HashSet;

use tch::{Kind, Tensor};

use super::{GroupOptions, ParamGroup, Parameters};
use crate::error::{Error, Result};
use crate::ffi;
use crate::ffi::optim::{Moving, Rule};
use crate::state::{Named, StateVisitor};

/// One parameter's state.
#[derive(Debug, Default)]
struct Slot {
    /// Empty before it is allocated.
    tensors: Vec<Tensor>,
    /// Steps of this parameter.
    count: u64,
}

/// Groups and their state, in step.
#[derive(Debug)]
pub(super) struct Slots {
    groups: Vec<ParamGroup>,
    slots: Vec<Vec<Slot>>,
    /// Names of the state tensors, as many as the rule keeps.
    names: &'static [&'static str],
    steps: u64,
}

impl Slots {
    pub(super) fn new<P: Parameters + ?Sized>(
        parameters: &P,
        lr: f64,
        weight_decay: f64,
        names: &'static [&'static str],
    ) -> Result<Self> {
        let mut slots = Self { groups: Vec::new(), slots: Vec::new(), names, steps: 0 };
        slots.add(parameters.named(), GroupOptions::default(), (lr, weight_decay))?;
        Ok(slots)
    }

    pub(super) fn groups(&self) -> &[ParamGroup] {
        &self.groups
    }

    pub(super) fn groups_mut(&mut self) -> &mut [ParamGroup] {
        &mut self.groups
    }

    /// Steps begun.
    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    fn add(
        &mut self,
        parameters: Vec<Named>,
        options: GroupOptions,
        (lr, weight_decay): (f64, f64),
    ) -> Result<()> {
        let mut known: HashSet<usize> =
            self.groups.iter().flat_map(ParamGroup::parameters).map(identity).collect();
        let mut taken = Vec::new();
        for parameter in parameters.as_slice().named() {
            if !known.insert(identity(&parameter)) {
                let problem = format!("`{}` is in a group already", parameter.name);
                return Err(Error::config("parameters", problem));
            }
            check(&parameter)?;
            taken.push(parameter);
        }
        let group =
            ParamGroup::new(taken, options.lr.unwrap_or(lr), options.weight_decay.unwrap_or(weight_decay))?;
        let slots = group.parameters().iter().map(|_| Slot::default()).collect();
        self.groups.push(group);
        self.slots.push(slots);
        Ok(())
    }

    /// Adds a group and allocates its state; on an error nothing has changed.
    pub(super) fn add_now(
        &mut self,
        parameters: Vec<Named>,
        options: GroupOptions,
        defaults: (f64, f64),
    ) -> Result<()> {
        self.add(parameters, options, defaults)?;
        let allocated = self.allocate();
        if allocated.is_err() {
            self.groups.pop();
            self.slots.pop();
        }
        allocated
    }

    /// Makes the state of every parameter that requires a gradient and has none yet.
    pub(super) fn allocate(&mut self) -> Result<()> {
        for (group, slots) in self.groups.iter().zip(&mut self.slots) {
            for (parameter, slot) in group.parameters().iter().zip(slots) {
                // A strategy may have exchanged the parameter for one of another dtype.
                let stale = slot.count == 0
                    && slot.tensors.iter().any(|tensor| tensor.kind() != parameter.tensor.kind());
                let wanted = slot.tensors.len() < self.names.len() || stale;
                if wanted && parameter.tensor.requires_grad() {
                    slot.tensors =
                        self.names.iter().map(|_| zeros(&parameter.tensor)).collect::<Result<_>>()?;
                }
            }
        }
        Ok(())
    }

    /// Refuses weights that are offloaded: their bytes come one at a time, by a wrapper.
    pub(super) fn present(&self, optimizer: &str) -> Result<()> {
        let away =
            |parameter: &&Named| parameter.tensor.requires_grad() && ffi::storage::is_away(&parameter.tensor);
        match self.groups.iter().flat_map(ParamGroup::parameters).find(away) {
            None => Ok(()),
            Some(parameter) => Err(Error::Incompatible {
                left: optimizer.to_owned(),
                right: "CpuOffload::parameters".to_owned(),
                why: format!("`{}` is away at the update", parameter.name),
                remedy: format!("wrap it: CpuOffload::optimizer({optimizer}).resident() or .disk(folder)"),
            }),
        }
    }

    /// Allocates and counts one step.
    pub(super) fn begin(&mut self) -> Result<()> {
        self.allocate()?;
        self.steps += 1;
        Ok(())
    }

    /// Moves all parameters.
    pub(super) fn step(&mut self, rule: Rule, divisor: f64) -> Result<()> {
        let groups = self.groups.iter().zip(&mut self.slots);
        let mut moving: Vec<_> = groups
            .flat_map(|(group, slots)| {
                group.parameters().iter().zip(slots).map(|(parameter, slot)| moving(group, parameter, slot))
            })
            .collect();
        ffi::optim::step(rule, &mut moving, divisor)
    }

    /// Moves one parameter.
    pub(super) fn step_one(&mut self, rule: Rule, group: usize, index: usize, divisor: f64) -> Result<()> {
        ffi::optim::step(rule, &mut [self.one(group, index)?], divisor)
    }

    /// One parameter with its state.
    pub(super) fn one(&mut self, group: usize, index: usize) -> Result<Moving<'_>> {
        let found = self.groups.get(group).and_then(|group| Some((group, group.parameters().get(index)?)));
        let slot = self.slots.get_mut(group).and_then(|slots| slots.get_mut(index));
        let (Some((group, parameter)), Some(slot)) = (found, slot) else {
            let problem = format!("no parameter {index} in group {group}");
            return Err(Error::config("step_parameter", problem));
        };
        Ok(moving(group, parameter, slot))
    }

    pub(super) fn state_of(&mut self, group: usize, index: usize) -> Vec<&mut Tensor> {
        let slot = self.slots.get_mut(group).and_then(|slots| slots.get_mut(index));
        slot.map(|slot| slot.tensors.iter_mut().collect()).unwrap_or_default()
    }

    pub(super) fn visit(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        visitor.count("steps", &mut self.steps)?;
        for (index, group) in self.groups.iter_mut().enumerate() {
            visitor.nested(&format!("group{index}"), |visitor| {
                visitor.float("lr", &mut group.lr)?;
                visitor.float("weight_decay", &mut group.weight_decay)
            })?;
        }
        for (group, slots) in self.groups.iter().zip(&mut self.slots) {
            for (parameter, slot) in group.parameters().iter().zip(slots) {
                if slot.tensors.is_empty() && !self.names.is_empty() {
                    continue;
                }
                visitor.nested(&parameter.name, |visitor| slot.visit(self.names, visitor))?;
            }
        }
        Ok(())
    }
}

impl Slot {
    fn visit(&mut self, names: &[&str], visitor: &mut StateVisitor<'_>) -> Result<()> {
        visitor.count("step", &mut self.count)?;
        names.iter().zip(&mut self.tensors).try_for_each(|(name, tensor)| visitor.tensor(name, tensor))
    }
}

fn moving<'a>(group: &'a ParamGroup, parameter: &'a Named, slot: &'a mut Slot) -> Moving<'a> {
    Moving {
        parameter: &parameter.tensor,
        state: &slot.tensors,
        count: &mut slot.count,
        lr: group.lr,
        weight_decay: group.weight_decay,
    }
}

fn identity(parameter: &Named) -> usize {
    ffi::tensor::identity(&parameter.tensor)
}

fn zeros(parameter: &Tensor) -> Result<Tensor> {
    // Of a detached handle, so that its strides are kept and no graph is made.
    Ok(parameter.f_detach()?.f_zeros_like()?)
}

fn check(parameter: &Named) -> Result<()> {
    let Named { name, tensor } = parameter;
    if !tensor.defined() {
        return Err(Error::config("parameters", format!("`{name}` is an undefined tensor")));
    }
    let kind = tensor.f_kind()?;
    if !matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16) {
        let problem = format!("`{name}` is {kind:?}; an optimizer moves Float, Double, Half or BFloat16");
        return Err(Error::config("parameters", problem));
    }
    if !tensor.is_leaf() {
        let problem = format!("`{name}` is computed from other tensors; give those, or a detached copy");
        return Err(Error::config("parameters", problem));
    }
    Ok(())
}
