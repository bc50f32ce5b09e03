//! Parameter groups with the state of each parameter: what the built-in optimizers share.

use std::collections::HashSet;
use std::fmt::Debug;

use tch::{Kind, Tensor};

use super::recipe::{Kept, Recipe};
use super::{Accumulates, GroupOptions, Optimizer, ParamGroup, Parameters, Share};
use crate::error::{Error, Result};
use crate::ffi;
use crate::ffi::optim::Moving;
use crate::state::{Named, StateVisitor};
use crate::step::Update;

/// An optimizer that consists of groups, their state and a recipe.
pub trait Slotted: Debug + Send {
    /// How it keeps state and moves.
    type Recipe: Recipe;

    /// Its groups and state.
    fn slots(&self) -> &Slots<Self::Recipe>;

    /// Its groups and state.
    fn slots_mut(&mut self) -> &mut Slots<Self::Recipe>;
}

impl<T: Slotted> Optimizer for T {
    fn name(&self) -> String {
        self.slots().recipe.name()
    }

    fn groups(&self) -> &[ParamGroup] {
        &self.slots().groups
    }

    fn groups_mut(&mut self) -> &mut [ParamGroup] {
        &mut self.slots_mut().groups
    }

    fn step(&mut self, update: &Update) -> Result<()> {
        self.slots().present()?;
        self.slots_mut().begin(update.divisor)?;
        let stepped = self.slots_mut().step(update.divisor);
        if matches!(&stepped, Err(error) if !matches!(error, Error::Poisoned { .. })) {
            self.slots_mut().steps -= 1;
        }
        stepped
    }

    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        self.slots_mut().visit(visitor)
    }

    fn allocate(&mut self) -> Result<()> {
        self.slots_mut().allocate()
    }

    fn begin(&mut self, update: &Update) -> Result<()> {
        self.slots_mut().begin(update.divisor)
    }

    fn step_parameter(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
        self.slots_mut().step_one(group, index, update.divisor)
    }

    fn steps_parameters(&self) -> bool {
        true
    }

    fn accumulates(&self) -> Accumulates {
        self.slots().recipe.accumulates()
    }

    fn accumulate(&mut self, group: usize, index: usize, update: &Update, share: Share) -> Result<()> {
        let (recipe, mut one) = self.slots_mut().one(group, index)?;
        recipe.accumulate(&mut one, update, share)
    }

    fn step_accumulated(&mut self, group: usize, index: usize, _: &Update) -> Result<()> {
        let (recipe, mut one) = self.slots_mut().one(group, index)?;
        recipe.step_accumulated(&mut one)
    }

    fn state_of(&mut self, group: usize, index: usize) -> Vec<&mut Tensor> {
        self.slots_mut().state_of(group, index)
    }

    fn folds_divisor(&self) -> bool {
        true
    }

    fn add_group(&mut self, parameters: Vec<Named>, options: GroupOptions) -> Result<()> {
        self.slots_mut().add_now(parameters, options)
    }
}

/// One parameter's state.
#[derive(Debug, Default)]
struct Slot {
    /// What the tensors are; empty before they are allocated.
    kept: Vec<Kept>,
    tensors: Vec<Tensor>,
    /// Steps of this parameter.
    count: u64,
    allocated: bool,
}

/// Groups and their state, in step.
#[derive(Debug)]
pub struct Slots<R> {
    recipe: R,
    groups: Vec<ParamGroup>,
    slots: Vec<Vec<Slot>>,
    steps: u64,
}

impl<R: Recipe> Slots<R> {
    /// One group of all parameters.
    pub(super) fn new<P: Parameters + ?Sized>(parameters: &P, recipe: R) -> Result<Self> {
        let mut slots = Self { recipe, groups: Vec::new(), slots: Vec::new(), steps: 0 };
        slots.add(parameters.named(), GroupOptions::default())?;
        Ok(slots)
    }

    pub(super) fn recipe(&self) -> &R {
        &self.recipe
    }

    pub(super) fn recipe_mut(&mut self) -> &mut R {
        &mut self.recipe
    }

    /// Steps begun.
    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    /// Adds a group, without its state.
    pub(super) fn add(&mut self, parameters: Vec<Named>, options: GroupOptions) -> Result<()> {
        let (lr, weight_decay) = self.recipe.defaults_of(self.groups.len());
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
    fn add_now(&mut self, parameters: Vec<Named>, options: GroupOptions) -> Result<()> {
        self.add(parameters, options)?;
        let allocated = self.allocate();
        if allocated.is_err() {
            self.groups.pop();
            self.slots.pop();
        }
        allocated
    }

    /// Makes the state of every parameter that requires a gradient and has none yet.
    fn allocate(&mut self) -> Result<()> {
        for (number, (group, slots)) in self.groups.iter().zip(&mut self.slots).enumerate() {
            for (parameter, slot) in group.parameters().iter().zip(slots) {
                if !parameter.tensor.requires_grad() {
                    continue;
                }
                // A strategy may have exchanged the parameter for one of another dtype.
                if slot.allocated && (slot.count > 0 || slot.kept == self.recipe.state(number, parameter)) {
                    continue;
                }
                self.recipe.check(parameter)?;
                *slot = Slot::make(self.recipe.state(number, parameter), &parameter.tensor)?;
            }
        }
        Ok(())
    }

    /// Refuses weights that are offloaded: their bytes come one at a time, by a wrapper.
    fn present(&self) -> Result<()> {
        let optimizer = self.recipe.name();
        let away =
            |parameter: &&Named| parameter.tensor.requires_grad() && ffi::storage::is_away(&parameter.tensor);
        match self.groups.iter().flat_map(ParamGroup::parameters).find(away) {
            None => Ok(()),
            Some(parameter) => Err(Error::Incompatible {
                left: optimizer.clone(),
                right: "CpuOffload::parameters".to_owned(),
                why: format!("`{}` is away at the update", parameter.name),
                remedy: format!("wrap it: CpuOffload::optimizer({optimizer}).resident() or .disk(folder)"),
            }),
        }
    }

    /// Allocates and counts one step.
    fn begin(&mut self, divisor: f64) -> Result<()> {
        self.allocate()?;
        let (recipe, moving) = self.moving();
        recipe.ready(&moving, divisor)?;
        self.steps += 1;
        Ok(())
    }

    /// Moves all parameters.
    fn step(&mut self, divisor: f64) -> Result<()> {
        let (recipe, mut moving) = self.moving();
        recipe.step(&mut moving, divisor)
    }

    fn moving(&mut self) -> (&R, Vec<Moving<'_>>) {
        let mut moving = Vec::new();
        for (number, (group, slots)) in self.groups.iter().zip(&mut self.slots).enumerate() {
            let pairs = group.parameters().iter().zip(slots).enumerate();
            moving.extend(pairs.map(|(index, (parameter, slot))| {
                slot.moving(group, parameter, Place { group: number, index })
            }));
        }
        (&self.recipe, moving)
    }

    /// Moves one parameter.
    fn step_one(&mut self, group: usize, index: usize, divisor: f64) -> Result<()> {
        let (recipe, one) = self.one(group, index)?;
        let mut moving = [one];
        recipe.ready(&moving, divisor)?;
        recipe.step(&mut moving, divisor)
    }

    /// One parameter with its state, and how it moves.
    fn one(&mut self, group: usize, index: usize) -> Result<(&R, Moving<'_>)> {
        let place = Place { group, index };
        let found = self.groups.get(group).and_then(|group| Some((group, group.parameters().get(index)?)));
        let slot = self.slots.get_mut(group).and_then(|slots| slots.get_mut(index));
        let (Some((group, parameter)), Some(slot)) = (found, slot) else {
            let problem = format!("no parameter {index} in group {group}");
            return Err(Error::config("step_parameter", problem));
        };
        Ok((&self.recipe, slot.moving(group, parameter, place)))
    }

    fn state_of(&mut self, group: usize, index: usize) -> Vec<&mut Tensor> {
        let slot = self.slots.get_mut(group).and_then(|slots| slots.get_mut(index));
        slot.map(|slot| slot.tensors.iter_mut().collect()).unwrap_or_default()
    }

    fn visit(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        visitor.count("steps", &mut self.steps)?;
        self.recipe.visit_layout(visitor)?;
        for (index, group) in self.groups.iter_mut().enumerate() {
            visitor.nested(&format!("group{index}"), |visitor| {
                visitor.float("lr", &mut group.lr)?;
                visitor.float("weight_decay", &mut group.weight_decay)
            })?;
        }
        for (group, slots) in self.groups.iter().zip(&mut self.slots) {
            for (parameter, slot) in group.parameters().iter().zip(slots).filter(|(_, slot)| slot.allocated) {
                visitor.nested(&parameter.name, |visitor| slot.visit(visitor))?;
            }
        }
        Ok(())
    }
}

/// Where a parameter stands in its groups.
#[derive(Clone, Copy)]
struct Place {
    group: usize,
    index: usize,
}

impl Slot {
    fn make(kept: Vec<Kept>, parameter: &Tensor) -> Result<Self> {
        let tensors = kept.iter().map(|one| one.make(parameter)).collect::<Result<_>>()?;
        Ok(Self { kept, tensors, count: 0, allocated: true })
    }

    fn moving<'a>(&'a mut self, group: &'a ParamGroup, parameter: &'a Named, place: Place) -> Moving<'a> {
        Moving {
            parameter: &parameter.tensor,
            state: &self.tensors,
            allocated: self.allocated,
            count: &mut self.count,
            lr: group.lr,
            weight_decay: group.weight_decay,
            key: (place.group as u64) << 32 | place.index as u64,
        }
    }

    fn visit(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        visitor.count("step", &mut self.count)?;
        self.kept
            .iter()
            .zip(&mut self.tensors)
            .try_for_each(|(kept, tensor)| visitor.tensor(kept.name, tensor))
    }
}

fn identity(parameter: &Named) -> usize {
    ffi::tensor::identity(&parameter.tensor)
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
