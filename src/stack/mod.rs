//! The driver: builds a stack of strategies over a model and an optimizer, and runs its
//! training steps. It knows no built-in strategy by name.

mod builder;
mod clock;
mod consumed;
mod estimate;
mod failure;
mod finals;
mod holdings;
mod max_batch;
mod moment;
mod phases;
mod report;
mod stand_in;
mod start;
mod state;
mod step;
mod update;
mod window;
mod windows;

pub use builder::StackBuilder;
pub use windows::{Micro, Windows};

use std::any::Any;
use std::sync::Arc;

use tch::Device;

use crate::error::{Error, Result};
use crate::memory::Role;
use crate::optim::{GroupOptions, Optimizer};
use crate::saved::Registration;
use crate::state::Named;
use crate::step::{DataPosition, Position, Preparation, Strategy};

use clock::Clock;
use estimate::Estimated;
use finals::Finals;
use start::Start;
use window::Open;

/// A model, its optimizer and the strategies that train it within memory.
///
/// Built by [`Stack::of`]. Three ways in: [`Stack::windows`] with [`Stack::step`];
/// [`Stack::step_with`] in a loop of your own, which then ends with [`Stack::flush`]; and
/// [`Stack::step_batch`], which splits a whole batch itself.
///
/// *Cost*: at most 5 µs per step and, for going back after a failure, two copies of the
/// buffers.
///
/// *Failure*: an error in forward puts buffers and generators back; the micro-batch is lost,
/// the window stays. An error in backward of the first micro-batch leaves everything as
/// before the window. In a later one, [`Stack::step`] returns
/// [`Error::WindowLost`] with everything as at the window's start. After the first parameter
/// moved it is [`Error::Poisoned`].
///
/// ```
/// use memfit::{Loss, Stack, optim::{AdamW, AdamWConfig}, strategies::GradAccumulator};
/// use memfit::tch::{nn, nn::Module, Device, Kind, Tensor};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let model = nn::linear(vs.root(), 4, 1, Default::default());
/// let mut training = Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default())?)
///     .with(GradAccumulator::every(2))
///     .build()?;
/// let batches = (0..4).map(|_| Tensor::randn([8, 4], (Kind::Float, Device::Cpu)));
/// for micro in training.windows(batches) {
///     let outcome = training.step(micro?, |x| Ok(Loss::mean(model.forward(x).square().mean(Kind::Float), 8)))?;
///     println!("{outcome:?}");
/// }
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Debug)]
pub struct Stack {
    model: Model,
    optimizer: Box<dyn Optimizer>,
    strategies: Vec<Box<dyn Strategy>>,
    position: Position,
    /// How far the data is consumed.
    consumed: Option<DataPosition>,
    open: Option<Open>,
    window_start: Start,
    micro_start: Start,
    clock: Arc<Clock>,
    health: Health,
    state_bytes: u64,
    warned_of_batch_norm: bool,
    finals: Finals,
    estimated: Estimated,
    registration: Registration,
}

/// What the driver knows of the model.
#[derive(Debug)]
struct Model {
    parameters: Vec<Named>,
    buffers: Vec<Named>,
    /// Further names of tied tensors, each with the name that the tensor goes by here.
    aliases: Vec<(String, String)>,
    device: Device,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Sound,
    Poisoned,
}

impl Stack {
    /// How far training has come.
    pub fn position(&self) -> Position {
        self.position
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &dyn Optimizer {
        self.optimizer.as_ref()
    }

    /// The optimizer, to change learning rates between steps.
    pub fn optimizer_mut(&mut self) -> &mut dyn Optimizer {
        self.optimizer.as_mut()
    }

    /// The strategies, in the order they act.
    pub fn strategies(&self) -> impl Iterator<Item = &dyn Strategy> {
        self.strategies.iter().map(AsRef::as_ref)
    }

    /// The first strategy of a type, if the stack has one.
    pub fn strategy<S: Strategy>(&self) -> Option<&S> {
        self.strategies().find_map(|strategy| (strategy as &dyn Any).downcast_ref())
    }

    /// The first strategy of a type, if the stack has one.
    pub fn strategy_mut<S: Strategy>(&mut self) -> Option<&mut S> {
        self.strategies.iter_mut().find_map(|strategy| (strategy.as_mut() as &mut dyn Any).downcast_mut())
    }

    /// The model's parameters, by name.
    pub fn parameters(&self) -> &[Named] {
        &self.model.parameters
    }

    /// The model's buffers, by name.
    pub fn buffers(&self) -> &[Named] {
        &self.model.buffers
    }

    /// Adds a parameter group to the optimizer in the middle of a run; its state is
    /// allocated now. Parameters that the stack does not know yet become known.
    ///
    /// # Errors
    /// An open window; a parameter that is in a group already, on another device or under a
    /// name that is taken: nothing changed. [`Error::Poisoned`] where a strategy cannot take
    /// it up.
    pub fn add_group(&mut self, parameters: Vec<Named>, options: GroupOptions) -> Result<()> {
        self.refuse_open("Stack::add_group")?;
        self.check_new(&parameters)?;
        self.optimizer.add_group(parameters.clone(), options)?;
        self.model.add(parameters);
        self.prepare().map_err(|error| self.poison(error))
    }

    fn check_new(&self, parameters: &[Named]) -> Result<()> {
        let held = || self.optimizer.groups().iter().flat_map(|group| group.parameters());
        for new in parameters {
            let identity = crate::ffi::tensor::identity(&new.tensor);
            let same = |known: &Named| crate::ffi::tensor::identity(&known.tensor) == identity;
            let known = self.model.parameters.iter().find(|known| same(known));
            let name_taken = self.model.parameters.iter().any(|known| known.name == new.name && !same(known));
            let problem = match () {
                () if new.tensor.device() != self.model.device => "is on another device than the model",
                () if name_taken => "has the name of another parameter",
                () if held().any(|held| same(held) || known.is_some_and(|known| known.name == held.name)) => {
                    "is in a group already"
                }
                () => continue,
            };
            return Err(Error::config("Stack::add_group", format!("`{}` {problem}", new.name)));
        }
        Ok(())
    }

    /// Registers the model's tensors and lets everyone allocate.
    fn prepare(&mut self) -> Result<()> {
        self.registration = crate::saved::register(&self.model.all())?;
        for strategy in &mut self.strategies {
            strategy.prepare(&mut Preparation {
                parameters: &self.model.parameters,
                buffers: &self.model.buffers,
                device: self.model.device,
                optimizer: self.optimizer.as_mut(),
            })?;
        }
        self.allocate()
    }

    /// Lets the optimizer allocate what its next update needs.
    fn allocate(&mut self) -> Result<()> {
        let _role = Role::OptimizerState.scope();
        self.optimizer.allocate()?;
        self.state_bytes = self.optimizer.state_bytes();
        Ok(())
    }

    fn refuse_open(&self, call: &'static str) -> Result<()> {
        if let Some(open) = &self.open {
            return Err(Error::CallOrder {
                call,
                state: format!("while a window is open ({} micro-batches done)", open.done()),
                remedy: "end it with flush() or drop it with discard() first",
            });
        }
        Ok(())
    }
}

impl Model {
    fn add(&mut self, parameters: Vec<Named>) {
        for parameter in parameters {
            let identity = crate::ffi::tensor::identity(&parameter.tensor);
            if !self.parameters.iter().any(|known| crate::ffi::tensor::identity(&known.tensor) == identity) {
                self.parameters.push(parameter);
            }
        }
    }

    fn all(&self) -> Vec<Named> {
        self.parameters.iter().chain(&self.buffers).cloned().collect()
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        if let Some(open) = &self.open {
            tracing::warn!(
                "a Stack was dropped with an open window of {} micro-batches: their gradients were never applied, call flush() after the loop",
                open.done()
            );
        }
    }
}

fn twice() -> Error {
    Error::CallOrder {
        call: "next",
        state: "twice in one phase of a strategy".to_owned(),
        remedy: "call it at most once",
    }
}

/// A strategy kept the phase from happening.
fn never() -> Error {
    Error::CallOrder {
        call: "Strategy::forward",
        state: "and did not call next".to_owned(),
        remedy: "call next, or return an error",
    }
}
