//! The optimizer table's side of memfit: what an update takes, and what it teaches.

use std::time::Instant;

use memfit::data::Random;
use memfit::optim::Optimizer;
use memfit::tch::{self, Device, Kind, Tensor};
use memfit::{StepOutcome, Update};

use crate::gpt::{Choice, Config, Failure, Plan, Text, With};

/// One of [`Choice`] over weights of its own, which keep their gradients.
pub struct Updates {
    optimizer: Box<dyn Optimizer>,
    _weights: Vec<Tensor>,
}

impl Updates {
    /// Shapes as in `1536x512,512`; the first update is made, so that the state is there.
    ///
    /// # Errors
    /// A name or a shape that is none.
    pub fn start(name: &str, shapes: &str) -> Result<Self, Failure> {
        let choice = named(name)?;
        tch::manual_seed(0);
        let mut weights = Vec::new();
        for shape in shapes.split(',') {
            let size = shape.split('x').map(str::parse).collect::<Result<Vec<i64>, _>>()?;
            let normal = |deviation: f64| Tensor::randn(&size, (Kind::Float, Device::Cpu)) * deviation;
            let weight = normal(0.02).set_requires_grad(true);
            (&weight * normal(0.01)).sum(Kind::Float).backward();
            weights.push(weight);
        }
        let mut optimizer = choice.make(&weights, 1e-3, Boxed)?;
        optimizer.step(&Update::plain())?;
        Ok(Self { optimizer, _weights: weights })
    }

    /// Seconds of one update, and the bytes of the state.
    ///
    /// # Errors
    /// Those of the optimizer.
    pub fn step(&mut self) -> Result<(f64, u64), Failure> {
        let start = Instant::now();
        self.optimizer.step(&Update::plain())?;
        Ok((start.elapsed().as_secs_f64(), self.optimizer.state_bytes()))
    }
}

struct Boxed;

impl With for Boxed {
    type Out = Box<dyn Optimizer>;

    fn with<O: Optimizer + 'static>(self, optimizer: O) -> memfit::Result<Self::Out> {
        Ok(Box::new(optimizer))
    }
}

/// Prints the rate, its own unless given, then the validation loss of each seed after so many
/// steps of the small model.
///
/// # Errors
/// A name that is none, text that cannot be read.
pub fn losses(name: &str, seeds: u64, steps: u64, rate: Option<f64>) -> Result<(), Failure> {
    let (choice, config) = (named(name)?, Config::small());
    let lr = rate.unwrap_or(choice.rate(&config));
    let text = Text::of_this_project(config.context)?;
    let validation = text.validation(&config, 256, Device::Cpu)?;
    println!("{lr}");
    for seed in 0..seeds {
        tch::manual_seed(seed as i64);
        let plan = Plan { optimizer: choice, ..Plan::plain(lr) };
        let mut training = plan.start_run(&config, u64::MAX, steps)?;
        let mut random = Random::of_sample(seed, 0, 0);
        for _ in 0..steps {
            let StepOutcome::Stepped { .. } =
                training.step(&text.batch(&config, &mut random, Device::Cpu)?)?
            else {
                return Err("a step was skipped".into());
            };
        }
        println!("{:.6}", training.validate(&validation)?);
    }
    Ok(())
}

fn named(name: &str) -> Result<Choice, Failure> {
    Choice::named(name).ok_or_else(|| {
        let all = Choice::ALL.map(Choice::name).join(", ");
        format!("there is no optimizer {name}: {all}").into()
    })
}
