//! What to say when one row does not fit.

use tch::{Device, Kind, Tensor};

use crate::error::Error;
use crate::memory::{Advice, EVENTS, Help, Peak, Recording, Role};
use crate::optim::{Optimizer, bytes_of};
use crate::state::Named;
use crate::step::{Recovery, Scene};

/// One row failed; it runs once more while this watches.
#[derive(Debug)]
pub(super) struct Stuck {
    recording: Option<Recording>,
}

impl Stuck {
    /// Begins to watch, where there is something to see.
    pub(super) fn begin(device: Device) -> (Self, Recovery) {
        let recording = if device == Device::Cpu { Recording::within(EVENTS).ok() } else { None };
        let recovery = if recording.is_some() { Recovery::Retry } else { Recovery::Window };
        (Self { recording }, recovery)
    }

    /// Labels gradients before the driver drops them.
    pub(super) fn label_gradients(&mut self, parameters: &[Named]) {
        if let Some(recording) = &mut self.recording {
            recording.label_gradients(parameters.iter().map(|one| &one.tensor));
        }
    }

    pub(super) fn explain(mut self, source: Error, scene: &mut Scene<'_>) -> Error {
        let peak = self.peak(scene);
        let missing = missing(&source);
        let helps = helps(peak.as_ref(), scene);
        let advice = Box::new(Advice::new(peak.as_ref(), missing, helps));
        Error::DoesNotFit { advice, source: Box::new(source) }
    }

    fn peak(&mut self, scene: &mut Scene<'_>) -> Option<Peak> {
        let recording = self.recording.as_mut()?;
        recording.label(Role::Parameters, scene.parameters.iter().map(|one| &one.tensor));
        recording.label(Role::Buffers, scene.buffers.iter().map(|one| &one.tensor));
        for (group, index) in places(scene.optimizer) {
            let state = scene.optimizer.state_of(group, index);
            recording.label(Role::OptimizerState, state.into_iter().map(|tensor| &*tensor));
        }
        recording.timeline().ok().map(|timeline| timeline.peak())
    }
}

fn places(optimizer: &dyn Optimizer) -> Vec<(usize, usize)> {
    let groups = optimizer.groups().iter().enumerate();
    groups.flat_map(|(group, held)| (0..held.parameters().len()).map(move |index| (group, index))).collect()
}

fn missing(error: &Error) -> Option<u64> {
    match error {
        Error::OutOfMemory { requested: Some(requested), live: Some(live), limit: Some(limit), .. } => {
            Some((requested + live).saturating_sub(*limit))
        }
        _ => None,
    }
}

/// What a strategy is called in the stack, what to write for it, and what it frees.
fn helps(peak: Option<&Peak>, scene: &mut Scene<'_>) -> Vec<Help> {
    let has = |name: &str| scene.strategies.iter().any(|strategy| strategy.starts_with(name));
    let of = |role| peak.map_or(0, |peak| peak.roles[role]);
    let single = scene.parameters.iter().all(|one| one.tensor.kind() == Kind::Float);
    let activations = of(Role::Activations);
    let folder = ".disk(std::env::temp_dir())";
    let optimizer = scene.optimizer.name();
    let weights: Vec<u64> = trained(scene.parameters).map(bytes_of).collect();
    let mut helps = Vec::new();
    if single && !has("AmpScaler") {
        helps.push(Help::new(".with(AmpScaler::bf16())", activations / 2));
    }
    if !has("CpuOffload::activations") {
        helps.push(Help::new("ActivationCheckpoint::new(block) around each block", activations));
        helps.push(Help::new(format!(".with(CpuOffload::activations(){folder})"), activations));
    }
    if !optimizer.contains("CpuOffload") {
        let state = besides_largest(scene.optimizer.state_bytes(), &weights);
        helps.push(Help::new(format!("CpuOffload::optimizer(optimizer){folder}?"), state));
    }
    if !optimizer.contains("InBackward") {
        let gradients = besides_largest(of(Role::Gradients), &weights);
        helps.push(Help::new("InBackward::new(optimizer)? and no MicroBatcher", gradients));
    }
    if !scene.parameters.iter().any(|one| crate::offload::is_offloaded(&one.tensor)) {
        let bytes = besides_largest(weights.iter().sum(), &weights);
        helps.push(Help::new("CpuOffload::parameters(block, …) around each block", bytes));
    }
    helps.retain(|help| help.bytes > 0);
    helps
}

fn trained(parameters: &[Named]) -> impl Iterator<Item = &Tensor> {
    parameters.iter().map(|one| &one.tensor).filter(|tensor| tensor.requires_grad())
}

/// `bytes` that are spread like the weights, less the share of the largest weight.
fn besides_largest(bytes: u64, weights: &[u64]) -> u64 {
    let (all, largest) = (weights.iter().sum::<u64>(), weights.iter().max().copied().unwrap_or_default());
    if all == 0 { 0 } else { (bytes as f64 * (all - largest) as f64 / all as f64) as u64 }
}
