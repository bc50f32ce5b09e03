use std::sync::Arc;

use tch::{Device, Tensor};

use super::activations::no_tier;
use super::berth::Berths;
use super::carrier::Carrier;
use super::hidden::Hidden;
use super::moved::{Moved, Observer};
use super::order::{AHEAD, Order};
use super::state_home::Home;
use super::weights;
use crate::error::{Error, Result};
use crate::ffi::grad;
use crate::memory::Role;
use crate::optim::{Accumulates, GroupOptions, Optimizer, ParamGroup, Share, bytes_of};
use crate::state::{Named, Residence, State, StateVisitor};
use crate::step::{Conflict, Exactness, GradientUse, Heard, Ready, Strategy, Update, WindowRule};

/// An optimizer whose state is in memory for one parameter at a time.
///
/// An update is bit-equal to the plain one where the parameters are on the CPU. Where they are
/// on CUDA it runs on the host: parameter and gradient are copied there, one at a time, and
/// the parameter back; it is bit-equal to the same update of a model on the CPU.
#[derive(Debug)]
pub struct OptimizerOffload<O> {
    inner: O,
    /// Its home, as the user wrote it.
    described: String,
    update_on: UpdateOn,
    /// `None`: the state stays in memory.
    berths: Option<Arc<Berths>>,
    observer: Observer,
    order: Order,
}

/// What is done with one parameter while its state is here.
enum Work<'a> {
    Step(&'a Update),
    Join(&'a Update, Share),
    StepJoined(&'a Update),
}

/// Where parameters that are on an accelerator are updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UpdateOn {
    Device,
    Host,
}

impl<O: Optimizer> OptimizerOffload<O> {
    pub(super) fn new(inner: O, home: Home) -> Result<Self> {
        if inner.gradients().changes_in_backward() {
            return Err(Error::Unsupported {
                what: "offloading the state of an optimizer that updates in backward".to_owned(),
                place: format!("by {}", inner.name()),
                remedy:
                    "wrap it the other way round: InBackward::new(CpuOffload::optimizer(…).disk(folder)?)"
                        .to_owned(),
            });
        }
        if !inner.has_state() {
            return Err(Error::Unsupported {
                what: "offloading the state of an optimizer that hides it".to_owned(),
                place: format!("by {}", inner.name()),
                remedy: "use one of memfit's own optimizers".to_owned(),
            });
        }
        let parameters = || inner.groups().iter().flat_map(ParamGroup::parameters);
        if matches!(home, Home::Host) && !parameters().any(|named| on_accelerator(&named.tensor)) {
            return Err(no_tier(&format!("CpuOffload::optimizer({}).host()", inner.name()), Device::Cpu));
        }
        let observer = Observer::default();
        let (described, update_on, berths) = match home {
            Home::Resident => (".resident()".to_owned(), UpdateOn::Device, None),
            Home::Host => (".host()".to_owned(), UpdateOn::Host, None),
            Home::Disk(disk, folder) => {
                let carrier = Arc::new(Carrier::new(Some(disk), 0));
                observer.watch(&carrier);
                let berths = Berths::new(carrier, observer.clone());
                (format!(".disk({:?})", folder.display().to_string()), UpdateOn::Host, Some(berths))
            }
        };
        let order = Order::default();
        let mut offload = Self { inner, described, update_on, berths, observer, order };
        offload.adopt_all()?;
        Ok(offload)
    }

    /// The optimizer.
    pub fn get_ref(&self) -> &O {
        &self.inner
    }

    /// The optimizer; its state is away.
    pub fn get_mut(&mut self) -> &mut O {
        &mut self.inner
    }

    /// What was carried so far.
    pub fn moved(&self) -> Moved {
        self.observer.moved()
    }

    /// A handle that watches it after it went into a stack.
    pub fn observer(&self) -> Observer {
        self.observer.clone()
    }

    fn all(&self) -> Vec<(usize, usize, Tensor)> {
        let mut all = Vec::new();
        for (group, parameters) in self.inner.groups().iter().enumerate() {
            for (index, named) in parameters.parameters().iter().enumerate() {
                all.push((group, index, named.tensor.shallow_clone()));
            }
        }
        all
    }

    /// The state of one parameter arrives.
    fn arrive(&mut self, group: usize, index: usize) -> Result<()> {
        let Some(berths) = self.berths.clone() else { return Ok(()) };
        let _role = Role::OptimizerState.scope();
        self.inner.state_of(group, index).into_iter().try_for_each(|state| berths.arrive(state))
    }

    /// The state of one parameter is written and leaves.
    fn go_home(&mut self, group: usize, index: usize) -> Result<()> {
        let Some(berths) = self.berths.clone() else { return Ok(()) };
        self.inner.state_of(group, index).into_iter().try_for_each(|state| berths.go_home(state))
    }

    fn adopt(&mut self, group: usize, index: usize) -> Result<()> {
        let Some(berths) = self.berths.clone() else { return Ok(()) };
        self.inner.state_of(group, index).into_iter().try_for_each(|state| berths.adopt(state))
    }

    /// Sends home whatever state there is already.
    fn adopt_all(&mut self) -> Result<()> {
        self.all().into_iter().try_for_each(|(group, index, _)| self.adopt(group, index))
    }

    fn announce(&mut self, group: usize, index: usize) {
        let Some(berths) = self.berths.clone() else { return };
        self.inner.state_of(group, index).into_iter().for_each(|state| berths.announce(state));
    }

    fn parameter(&self, group: usize, index: usize) -> Result<Tensor> {
        let found = self.inner.groups().get(group).and_then(|group| group.parameters().get(index));
        found
            .map(|named| named.tensor.shallow_clone())
            .ok_or_else(|| Error::config("step_parameter", format!("no parameter {index} in group {group}")))
    }

    /// Does something with one parameter while its state visits.
    fn visit(&mut self, group: usize, index: usize, work: &Work<'_>) -> Result<()> {
        let parameter = self.parameter(group, index)?;
        self.arrive(group, index)?;
        self.move_one(group, index, &parameter, work)?;
        self.go_home(group, index).map_err(poisoned)
    }

    fn work(&mut self, group: usize, index: usize, work: &Work<'_>) -> Result<()> {
        match *work {
            Work::Step(update) => self.inner.step_parameter(group, index, update),
            Work::Join(update, share) => self.inner.accumulate(group, index, update, share),
            Work::StepJoined(update) => self.inner.step_accumulated(group, index, update),
        }
    }

    /// Moves one parameter whose state is here.
    fn move_one(&mut self, group: usize, index: usize, parameter: &Tensor, work: &Work<'_>) -> Result<()> {
        let visiting = weights::hold(parameter)?;
        if !self.leaves_device(parameter) {
            self.work(group, index, work)?;
            return visiting.map_or(Ok(()), |hold| hold.end().map_err(poisoned));
        }
        let host = on_host(parameter)?;
        if let Some(gradient) = grad::get(parameter) {
            grad::set(&host, &gradient.f_to_device(Device::Cpu)?)?;
        }
        self.exchange(group, index, &host);
        let moved = self.work(group, index, work);
        self.exchange(group, index, parameter);
        moved?;
        // The state has moved already, so that a weight that has not is half a step.
        tch::no_grad(|| parameter.shallow_clone().f_copy_(&host)).map_err(|error| poisoned(error.into()))?;
        visiting.map_or(Ok(()), |hold| hold.end().map_err(poisoned))
    }

    /// Whether a parameter's update runs on the host though the parameter is elsewhere.
    fn leaves_device(&self, parameter: &Tensor) -> bool {
        self.update_on == UpdateOn::Host && on_accelerator(parameter)
    }

    fn exchange(&mut self, group: usize, index: usize, tensor: &Tensor) {
        if let Some(group) = self.inner.groups_mut().get_mut(group) {
            group.replace(index, tensor);
        }
    }

    /// Makes the state of one parameter, while every other one looks frozen, and lets it go.
    fn allocate_one(&mut self, group: usize, index: usize, parameter: &Tensor) -> Result<()> {
        let made = if self.leaves_device(parameter) {
            let host = on_host(parameter)?;
            self.exchange(group, index, &host);
            let made = self.inner.allocate();
            self.exchange(group, index, parameter);
            made
        } else {
            let _ = parameter.f_set_requires_grad(true)?;
            let made = self.inner.allocate();
            let _ = parameter.f_set_requires_grad(false)?;
            made
        };
        made?;
        self.adopt(group, index)
    }
}

impl<O: Optimizer> Optimizer for OptimizerOffload<O> {
    fn name(&self) -> String {
        format!("CpuOffload::optimizer({}){}", self.inner.name(), self.described)
    }

    fn groups(&self) -> &[ParamGroup] {
        self.inner.groups()
    }

    fn groups_mut(&mut self) -> &mut [ParamGroup] {
        self.inner.groups_mut()
    }

    fn gradients(&self) -> GradientUse {
        if self.berths.is_some() { GradientUse::Announced } else { GradientUse::AtUpdate }
    }

    fn gradient_ready(&mut self, ready: &Ready) -> Result<Heard> {
        let Ready { group, index, .. } = *ready;
        self.order.add((group, index));
        let bytes: u64 = self.inner.state_of(group, index).iter().map(|state| bytes_of(state)).sum();
        if self.order.announced + bytes <= AHEAD {
            self.order.announced += bytes;
            self.announce(group, index);
        }
        Ok(Heard::Noted)
    }

    fn exactness(&self, window: WindowRule) -> Exactness {
        self.inner.exactness(window)
    }

    fn step(&mut self, update: &Update) -> Result<()> {
        let order = std::mem::take(&mut self.order);
        self.allocate()?;
        let mut due = self.all();
        due.retain(|(.., parameter)| parameter.requires_grad() && grad::get(parameter).is_some());
        due.sort_by_key(|(group, index, _)| order.place((*group, *index)));
        let Some((group, index, _)) = due.first() else { return self.inner.begin(update) };
        // The first read comes before anything has moved or been counted.
        self.arrive(*group, *index)?;
        self.inner.begin(update)?;
        for (done, (group, index, parameter)) in due.iter().enumerate() {
            if let Some((group, index, _)) = due.get(done + 1) {
                self.announce(*group, *index);
            }
            let moved = self
                .arrive(*group, *index)
                .and_then(|()| self.move_one(*group, *index, parameter, &Work::Step(update)));
            // Before anything moved, the step is not counted.
            moved.map_err(|error| match error {
                Error::Poisoned { .. } => error,
                error if done == 0 && self.inner.cancel() => error,
                error => poisoned(error),
            })?;
            self.go_home(*group, *index).map_err(poisoned)?;
        }
        Ok(())
    }

    fn visit_state(&mut self, visitor: &mut StateVisitor<'_>) -> Result<()> {
        match self.berths.clone() {
            Some(berths) => visitor.residing(berths, |visitor| self.inner.visit_state(visitor)),
            None => self.inner.visit_state(visitor),
        }
    }

    fn allocate(&mut self) -> Result<()> {
        let mut due = Vec::new();
        for (group, index, parameter) in self.all() {
            if self.inner.state_of(group, index).is_empty() && parameter.requires_grad() {
                due.push((group, index, parameter));
            } else {
                self.adopt(group, index)?;
            }
        }
        let hidden = Hidden::new(due.iter().map(|(.., parameter)| parameter.shallow_clone()).collect());
        for (group, index, parameter) in &due {
            self.allocate_one(*group, *index, parameter)?;
        }
        drop(hidden);
        Ok(())
    }

    fn begin(&mut self, update: &Update) -> Result<()> {
        self.allocate()?;
        self.inner.begin(update)
    }

    fn cancel(&mut self) -> bool {
        self.inner.cancel()
    }

    fn steps_parameters(&self) -> bool {
        self.inner.steps_parameters()
    }

    fn step_parameter(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
        self.visit(group, index, &Work::Step(update))
    }

    fn accumulates(&self) -> Accumulates {
        self.inner.accumulates()
    }

    fn accumulate(&mut self, group: usize, index: usize, update: &Update, share: Share) -> Result<()> {
        self.visit(group, index, &Work::Join(update, share))
    }

    fn step_accumulated(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
        self.visit(group, index, &Work::StepJoined(update))
    }

    fn state_of(&mut self, group: usize, index: usize) -> Vec<&mut Tensor> {
        self.inner.state_of(group, index)
    }

    fn folds_divisor(&self) -> bool {
        self.inner.folds_divisor()
    }

    fn refuses_snapshot(&self) -> Option<String> {
        self.inner.refuses_snapshot()
    }

    /// Where state lives changes no value.
    fn identity(&self) -> String {
        self.inner.identity()
    }

    /// As of the inner optimizer; the new group's state is in memory for a moment.
    fn add_group(&mut self, parameters: Vec<Named>, options: GroupOptions) -> Result<()> {
        self.inner.add_group(parameters, options)?;
        self.allocate()
    }

    fn conflict(&self, strategy: &dyn Strategy) -> Option<Conflict> {
        self.inner.conflict(strategy)
    }

    fn zero_grad(&mut self) {
        self.inner.zero_grad();
    }

    /// As the inner optimizer loads; state on disk is in memory together until that is done.
    fn load(&mut self, state: &State) -> Result<()> {
        self.allocate()?;
        let all = self.all();
        let arrived = all.iter().try_for_each(|(group, index, _)| self.arrive(*group, *index));
        let loaded = arrived.and_then(|()| self.inner.load(state));
        let home = all.iter().try_for_each(|(group, index, _)| self.go_home(*group, *index));
        loaded.and(home.map_err(poisoned))
    }
}

fn on_accelerator(tensor: &Tensor) -> bool {
    tensor.device() != Device::Cpu
}

/// A leaf on the host with a parameter's values.
fn on_host(parameter: &Tensor) -> Result<Tensor> {
    Ok(parameter.f_detach()?.f_to_device(Device::Cpu)?.f_set_requires_grad(true)?)
}

fn poisoned(error: Error) -> Error {
    match error {
        Error::Poisoned { .. } => error,
        error => Error::Poisoned { source: Box::new(error) },
    }
}
