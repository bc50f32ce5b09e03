//! Which parts of the crate would help a stack that does not fit, and with how much. None is named
//! that `build()` would refuse there.

use tch::{Device, Kind, Tensor};

use super::explain::places;
use crate::memory::{Help, Peak, Role};
use crate::offload::{CpuOffload, is_offloaded};
use crate::optim::{adamw8bit, bytes_of};
use crate::state::Named;
use crate::step::{Gradients, Place, Scene, Strategy, WindowRule, needs_gradients};
use crate::strategies::AmpScaler;

/// The cheapest in time first. Bytes that were not seen are unknown.
pub(super) fn helps(peak: Option<&Peak>, scene: &mut Scene<'_>) -> Vec<Help> {
    let mut helps = of_activations(peak.map(|peak| peak.roles[Role::Activations]), scene);
    helps.extend(of_state(scene));
    helps.extend(of_gradients(peak.map(|peak| peak.roles[Role::Gradients]), scene));
    helps.extend(of_weights(scene));
    helps.retain(|help| help.bytes != Some(0));
    helps
}

fn of_activations(bytes: Option<u64>, scene: &Scene<'_>) -> Vec<Help> {
    let mut helps = Vec::new();
    let single = scene.parameters.iter().all(|one| one.tensor.kind() == Kind::Float);
    if single && joins(&AmpScaler::bf16(), scene) {
        helps.push(Help::new(".with(AmpScaler::bf16())", bytes.map(|bytes| bytes / 2)));
    }
    helps.push(Help::new("ActivationCheckpoint::new(block) around each block", bytes));
    if joins(&CpuOffload::activations(), scene) {
        helps.push(Help::new(".with(CpuOffload::activations().disk(std::env::temp_dir()))", bytes));
    }
    helps
}

fn of_state(scene: &mut Scene<'_>) -> Vec<Help> {
    let name = scene.optimizer.name();
    let moves = scene.optimizer.gradients().changes_in_backward();
    if name.contains("CpuOffload") || moves || !scene.optimizer.has_state() {
        return Vec::new();
    }
    let mut helps = Vec::new();
    let (mut bf16, mut quantised) = (0, 0);
    if name == "AdamW" {
        for elements in fp32_moments(scene) {
            bf16 += 4 * elements;
            quantised += 8 * elements - adamw8bit::state_bytes_of(elements);
        }
    }
    helps.push(Help::new("AdamWConfig::default().moments(Kind::BFloat16)", Some(bf16)));
    helps.push(Help::new("AdamW8bit::new(…) in place of AdamW", Some(quantised)));
    let state = besides_largest(scene.optimizer.state_bytes(), &weights(scene));
    helps.push(Help::new("CpuOffload::optimizer(optimizer).disk(std::env::temp_dir())?", Some(state)));
    helps
}

/// Elements of the parameters on the CPU that have two moments in fp32.
fn fp32_moments(scene: &mut Scene<'_>) -> Vec<u64> {
    let mut found = Vec::new();
    for (group, index) in places(scene.optimizer) {
        let parameter = scene.optimizer.groups()[group].parameters()[index].tensor.shallow_clone();
        let state = scene.optimizer.state_of(group, index);
        let single = state.len() == 2 && state.iter().all(|one| one.kind() == Kind::Float);
        if single && parameter.device() == Device::Cpu {
            found.push(parameter.numel() as u64);
        }
    }
    found
}

fn of_gradients(bytes: Option<u64>, scene: &Scene<'_>) -> Option<Help> {
    let several = |one: &dyn Strategy| !matches!(one.window(), None | Some(WindowRule::Micros(0 | 1)));
    let refused = |one: &dyn Strategy| needs_gradients(one).is_some() || several(one);
    let optimizer = &*scene.optimizer;
    if !optimizer.steps_parameters()
        || optimizer.gradients().changes_in_backward()
        || scene.beside.iter().any(|one| refused(*one))
    {
        return None;
    }
    let bytes = bytes.map(|bytes| besides_largest(bytes, &weights(scene)));
    Some(Help::new("InBackward::new(optimizer)? and no MicroBatcher", bytes))
}

fn of_weights(scene: &Scene<'_>) -> Option<Help> {
    let copied = |one: &dyn Strategy| {
        one.place() == Place::Master
            || (one.place() == Place::Window && one.gradients() == Gradients::AfterClose)
    };
    let half = scene.parameters.iter().any(|one| matches!(one.tensor.kind(), Kind::Half | Kind::BFloat16));
    let refused = half && scene.beside.iter().any(|one| copied(*one));
    if refused || scene.parameters.iter().any(|one| is_offloaded(&one.tensor)) {
        return None;
    }
    let weights = weights(scene);
    let bytes = besides_largest(weights.iter().sum(), &weights);
    Some(Help::new("CpuOffload::parameters(block, …) around each block", Some(bytes)))
}

/// Whether `build()` takes a strategy into the stack as it is.
fn joins(candidate: &dyn Strategy, scene: &Scene<'_>) -> bool {
    let refused = |other: &dyn Strategy| {
        other.place() == candidate.place()
            || other.conflict(candidate).is_some()
            || candidate.conflict(other).is_some()
    };
    scene.optimizer.conflict(candidate).is_none() && !scene.beside.iter().any(|one| refused(*one))
}

/// Bytes of the parameters that are trained.
fn weights(scene: &Scene<'_>) -> Vec<u64> {
    let trained = |one: &&Named| one.tensor.requires_grad();
    let bytes = |tensor: &Tensor| bytes_of(tensor);
    scene.parameters.iter().filter(trained).map(|one| bytes(&one.tensor)).collect()
}

/// `bytes` that are spread like the weights, less the share of the largest weight.
fn besides_largest(bytes: u64, weights: &[u64]) -> u64 {
    let (all, largest) = (weights.iter().sum::<u64>(), weights.iter().max().copied().unwrap_or_default());
    if all == 0 { 0 } else { (bytes as f64 * (all - largest) as f64 / all as f64) as u64 }
}
