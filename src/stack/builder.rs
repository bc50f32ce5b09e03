use tch::{Device, nn::VarStore};

use super::clock::Clock;
use super::estimate::Estimated;
use super::finals::Finals;
use super::start::Start;
use super::{Health, Model, Stack};
use crate::error::{Error, Result};
use crate::ffi;
use crate::optim::{Optimizer, Parameters};
use crate::state::Named;
use crate::step::{Conflict, Position, Relation, Strategy, WindowRule, needs_gradients};

/// Collects strategies for a [`Stack`].
#[must_use = "a stack is made by build()"]
#[derive(Debug)]
pub struct StackBuilder {
    parameters: Vec<Named>,
    buffers: Vec<Named>,
    aliases: Vec<(String, String)>,
    optimizer: Box<dyn Optimizer>,
    strategies: Vec<Box<dyn Strategy>>,
}

impl Stack {
    /// Starts a stack over the variables of a `VarStore`: its parameters and buffers, by name.
    pub fn of(vs: &VarStore, optimizer: impl Optimizer + 'static) -> StackBuilder {
        let parameters = vs.named();
        let trained: Vec<usize> = parameters.iter().map(|one| ffi::tensor::identity(&one.tensor)).collect();
        let mut buffers: Vec<Named> = vs
            .variables()
            .into_iter()
            .filter(|(_, tensor)| !trained.contains(&ffi::tensor::identity(tensor)))
            .map(|(name, tensor)| Named { name, tensor })
            .collect();
        buffers.sort_by(|a, b| a.name.cmp(&b.name));
        let mut builder = Stack::tensors(&parameters, &buffers, optimizer);
        builder.aliases = vs.aliases();
        builder
    }

    /// Starts a stack over a model without a `VarStore`: named parameters and buffers, each
    /// tensor once; bare tensors are named `0`, `1`, ….
    pub fn tensors(
        parameters: &(impl Parameters + ?Sized),
        buffers: &(impl Parameters + ?Sized),
        optimizer: impl Optimizer + 'static,
    ) -> StackBuilder {
        StackBuilder {
            parameters: parameters.named(),
            buffers: buffers.named(),
            aliases: parameters.aliases().into_iter().chain(buffers.aliases()).collect(),
            optimizer: Box::new(optimizer),
            strategies: Vec::new(),
        }
    }
}

impl StackBuilder {
    /// Adds a strategy. The order of these calls never matters.
    pub fn with(mut self, strategy: impl Strategy) -> Self {
        self.strategies.push(Box::new(strategy));
        self
    }

    /// Puts the strategies in the order they act and allocates what an update will need.
    ///
    /// # Errors
    /// [`Error::Incompatible`] for parts that cannot work together, naming both and the
    /// nearest stack that works; a model without trainable parameters or an optimizer over
    /// parameters that the stack does not know; whatever a strategy finds in preparing.
    pub fn build(self) -> Result<Stack> {
        let Self { parameters, buffers, aliases, optimizer, mut strategies } = self;
        let device = device_of(&parameters)?;
        check_known(&parameters, optimizer.as_ref())?;
        refuse_conflicts(&strategies, optimizer.as_ref())?;
        order(&mut strategies)?;
        let model = Model { parameters, buffers, aliases, device };
        let registration = crate::saved::register(&model.all())?;
        let mut stack = Stack {
            position: Position::default(),
            consumed: None,
            open: None,
            window_start: Start::new(&model.buffers, device)?,
            micro_start: Start::new(&model.buffers, device)?,
            clock: Clock::new(WindowRule::Micros(1)),
            health: Health::Sound,
            state_bytes: 0,
            warned_of_batch_norm: false,
            finals: Finals::default(),
            estimated: Estimated::default(),
            registration,
            model,
            optimizer,
            strategies,
        };
        stack.prepare()?;
        stack.rule();
        Ok(stack)
    }
}

fn device_of(parameters: &[Named]) -> Result<Device> {
    let Some(first) = parameters.iter().find(|parameter| parameter.tensor.requires_grad()) else {
        let problem = "the model has no parameter that requires a gradient";
        return Err(Error::config("Stack::of", problem));
    };
    let device = first.tensor.device();
    match parameters.iter().find(|parameter| parameter.tensor.device() != device) {
        None => Ok(device),
        Some(other) => Err(Error::config(
            "Stack::of",
            format!(
                "`{}` is on {device:?} and `{}` on {:?}: a stack trains on one device",
                first.name,
                other.name,
                other.tensor.device()
            ),
        )),
    }
}

fn check_known(parameters: &[Named], optimizer: &dyn Optimizer) -> Result<()> {
    let known: std::collections::HashSet<usize> =
        parameters.iter().map(|parameter| ffi::tensor::identity(&parameter.tensor)).collect();
    let mut held = optimizer.groups().iter().flat_map(|group| group.parameters());
    match held.find(|parameter| !known.contains(&ffi::tensor::identity(&parameter.tensor))) {
        None => Ok(()),
        Some(unknown) => Err(Error::config(
            "Stack::of",
            format!("{} holds `{}`, which is no parameter of this model", optimizer.name(), unknown.name),
        )),
    }
}

fn refuse_conflicts(strategies: &[Box<dyn Strategy>], optimizer: &dyn Optimizer) -> Result<()> {
    for (index, one) in strategies.iter().enumerate() {
        if let Some(conflict) = optimizer.conflict(one.as_ref()) {
            return Err(incompatible(optimizer.name(), one.name(), conflict));
        }
        if optimizer.gradients().changes_in_backward()
            && let Some(conflict) = needs_gradients(one.as_ref())
        {
            return Err(incompatible(optimizer.name(), one.name(), conflict));
        }
        for other in &strategies[index + 1..] {
            let conflict = one.conflict(other.as_ref()).or_else(|| other.conflict(one.as_ref()));
            if let Some(conflict) = conflict {
                return Err(incompatible(one.name(), other.name(), conflict));
            }
        }
    }
    Ok(())
}

/// Sorts by place and, at one place, by what the strategies say of each other.
fn order(strategies: &mut Vec<Box<dyn Strategy>>) -> Result<()> {
    strategies.sort_by_key(|strategy| strategy.place());
    let mut waiting = std::mem::take(strategies);
    while !waiting.is_empty() {
        let first = outermost(&waiting)?;
        strategies.push(waiting.remove(first));
    }
    Ok(())
}

/// The one at the first place that stands inside no other there.
fn outermost(waiting: &[Box<dyn Strategy>]) -> Result<usize> {
    let here = waiting.iter().take_while(|strategy| strategy.place() == waiting[0].place()).count();
    for (index, one) in waiting[..here].iter().enumerate() {
        let mut behind = false;
        for (_, other) in waiting[..here].iter().enumerate().filter(|(at, _)| *at != index) {
            behind |= comes_after(one.as_ref(), other.as_ref())?;
        }
        if !behind {
            return Ok(index);
        }
    }
    // A circle has at least two.
    Err(same_place(waiting[0].as_ref(), waiting[here - 1].as_ref()))
}

/// Whether `one` acts inside `other`, which is at the same place.
fn comes_after(one: &dyn Strategy, other: &dyn Strategy) -> Result<bool> {
    match (one.relation(other), other.relation(one)) {
        (Relation::Commutes, Relation::Commutes) => Ok(false),
        (Relation::Before, Relation::Commutes | Relation::Unknown) => Ok(false),
        (Relation::Commutes | Relation::Unknown, Relation::Before) => Ok(true),
        _ => Err(same_place(other, one)),
    }
}

fn same_place(one: &dyn Strategy, other: &dyn Strategy) -> Error {
    let why = format!("both act at {:?} and they do not agree on which comes first", one.place());
    let remedy = "keep one of them, or say their order in Strategy::relation";
    incompatible(one.name(), other.name(), Conflict::new(why, remedy))
}

fn incompatible(left: String, right: String, conflict: Conflict) -> Error {
    Error::Incompatible { left, right, why: conflict.why, remedy: conflict.remedy }
}
