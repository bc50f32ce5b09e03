use std::path::{Path, PathBuf};
use std::sync::Arc;

use tch::{Device, Tensor};

use super::activations::no_tier;
use super::berth::Berths;
use super::carrier::Carrier;
use super::disk::Disk;
use super::moved::{Moved, Observer};
use super::weights;
use crate::error::{Error, Result};
use crate::ffi::grad;
use crate::memory::Role;
use crate::optim::{GroupOptions, Optimizer, ParamGroup};
use crate::state::{Named, Residence, StateVisitor};
use crate::step::{Conflict, Strategy, Update};

/// Where an optimizer's state will live; made by
/// [`CpuOffload::optimizer`](super::CpuOffload::optimizer).
#[derive(Debug)]
#[must_use = "say where the state lives: `.disk(folder)?` or `.host()?`"]
pub struct StateHome<O> {
    inner: O,
}

impl<O: Optimizer> StateHome<O> {
    pub(super) fn new(inner: O) -> Self {
        Self { inner }
    }

    /// The state lives in a temporary file in this folder. It is made, and the file reserved
    /// at full size, by `build()`, or by [`Optimizer::allocate`] in a plain loop.
    ///
    /// # Errors
    /// [`Error::Io`] for an unusable folder; [`Error::Unsupported`] for an
    /// optimizer whose state cannot be reached; out of memory.
    pub fn disk(self, folder: impl AsRef<Path>) -> Result<OptimizerOffload<O>> {
        let disk = Disk::new(folder.as_ref())?;
        OptimizerOffload::new(self.inner, Home::Disk(disk, folder.as_ref().to_owned()))
    }

    /// The state stays where it is: for weights that are offloaded, see
    /// [`ParameterOffload`](super::ParameterOffload).
    ///
    /// # Errors
    /// As [`StateHome::disk`].
    pub fn resident(self) -> Result<OptimizerOffload<O>> {
        OptimizerOffload::new(self.inner, Home::Resident)
    }

    /// The state of parameters on CUDA lives, and their update runs, on the host.
    ///
    /// # Errors
    /// [`Error::Incompatible`] where no parameter is on CUDA: the host is where the state is
    /// already. As [`StateHome::disk`].
    pub fn host(self) -> Result<OptimizerOffload<O>> {
        OptimizerOffload::new(self.inner, Home::Host)
    }
}

#[derive(Debug)]
enum Home {
    Resident,
    Host,
    Disk(Arc<Disk>, PathBuf),
}

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
}

/// Where parameters that are on an accelerator are updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UpdateOn {
    Device,
    Host,
}

impl<O: Optimizer> OptimizerOffload<O> {
    fn new(inner: O, home: Home) -> Result<Self> {
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
        let mut offload = Self { inner, described, update_on, berths, observer };
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

    /// Moves one parameter whose state is here.
    fn move_one(&mut self, group: usize, index: usize, parameter: &Tensor, update: &Update) -> Result<()> {
        let visiting = weights::hold(parameter)?;
        if !self.leaves_device(parameter) {
            self.inner.step_parameter(group, index, update)?;
            return visiting.map_or(Ok(()), |hold| hold.end().map_err(poisoned));
        }
        let host = on_host(parameter)?;
        if let Some(gradient) = grad::get(parameter) {
            grad::set(&host, &gradient.f_to_device(Device::Cpu)?)?;
        }
        self.exchange(group, index, &host);
        let moved = self.inner.step_parameter(group, index, update);
        self.exchange(group, index, parameter);
        moved?;
        tch::no_grad(|| parameter.shallow_clone().f_copy_(&host))?;
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

    fn step(&mut self, update: &Update) -> Result<()> {
        self.allocate()?;
        let mut due = self.all();
        due.retain(|(.., parameter)| parameter.requires_grad() && grad::get(parameter).is_some());
        let Some((group, index, _)) = due.first() else { return self.inner.begin(update) };
        // The first read comes before anything has moved or been counted.
        self.arrive(*group, *index)?;
        self.inner.begin(update)?;
        for (done, (group, index, parameter)) in due.iter().enumerate() {
            if let Some((group, index, _)) = due.get(done + 1) {
                self.announce(*group, *index);
            }
            let moved =
                self.arrive(*group, *index).and_then(|()| self.move_one(*group, *index, parameter, update));
            if done == 0 {
                moved?;
            } else {
                moved.map_err(poisoned)?;
            }
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

    fn step_parameter(&mut self, group: usize, index: usize, update: &Update) -> Result<()> {
        let found = self.all().into_iter().find(|(g, i, _)| (*g, *i) == (group, index));
        let Some((.., parameter)) = found else {
            return self.inner.step_parameter(group, index, update);
        };
        self.arrive(group, index)?;
        self.move_one(group, index, &parameter, update)?;
        self.go_home(group, index).map_err(poisoned)
    }

    fn state_of(&mut self, group: usize, index: usize) -> Vec<&mut Tensor> {
        self.inner.state_of(group, index)
    }

    fn folds_divisor(&self) -> bool {
        self.inner.folds_divisor()
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
}

/// Parameters that look frozen for a while.
struct Hidden(Vec<Tensor>);

impl Hidden {
    fn new(parameters: Vec<Tensor>) -> Self {
        for parameter in &parameters {
            let _ = parameter.f_set_requires_grad(false);
        }
        Self(parameters)
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        for parameter in &self.0 {
            let _ = parameter.f_set_requires_grad(true);
        }
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
