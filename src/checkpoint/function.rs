use super::segment::Segment;
use super::shared::Shared;
use super::tensors::Tensors;
use crate::error::Result;

/// Runs `f` over the module and the inputs without keeping its activations: backward runs it
/// again.
///
/// `f` gets all it needs through its arguments, since the graph outlives any borrow; it may
/// capture numbers and flags. Inputs and outputs may be several, and optional. [`Segment`] has
/// the settings: a name, checked values, early stop.
///
/// # Errors
/// A panic in `f`, or a device whose generator cannot be captured.
///
/// ```
/// use memfit::checkpoint::{Shared, checkpoint};
/// use memfit::tch::nn::{self, Module};
/// use memfit::tch::{Device, Kind, Tensor};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let layer = Shared::new(nn::linear(vs.root(), 4, 4, Default::default()));
/// let x = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
/// let y = checkpoint(&layer, &(x, None::<Tensor>), |layer, (x, mask)| {
///     let y = layer.forward(x).relu();
///     mask.as_ref().map_or(y.shallow_clone(), |mask| y * mask)
/// })?;
/// y.sum(Kind::Float).backward();
/// # Ok::<(), memfit::Error>(())
/// ```
pub fn checkpoint<M, I, O, F>(module: &Shared<M>, inputs: &I, f: F) -> Result<O>
where
    M: Send + 'static,
    I: Tensors + Send + 'static,
    O: Tensors,
    F: Fn(&M, &I) -> O + Clone + Send + 'static,
{
    Segment::named(std::any::type_name::<M>().rsplit("::").next().unwrap_or_default()).run(module, inputs, f)
}
