//! The last linear layer and the cross-entropy as one, so that the logits never exist as a
//! whole.
//!
//! Of `N` tokens and `V` classes, logits in fp32 take `4·N·V` bytes, and the plain form holds
//! them three times over. Here a chunk of rows at a time becomes loss and gradients and is
//! gone: at 2,048 tokens the plain form's three copies are 0.8 GB for a vocabulary of 32,000
//! and 6.3 GB for 256,000, a chunk is 16 MiB for both.
//!
//! *Cost*: one chunk of logits ([`LinearCrossEntropyConfig::chunk_bytes`]) beside the gradients
//! of hidden, weight and bias, which forward makes and backward hands on: as large as those of
//! the plain form's backward, in fp32 for half-precision weights. `docs/memory-model.md` has the
//! formula to the byte. The same three matrix products as the plain form, no pass more; under
//! no-grad one product. On an accelerator one readback, of the count of tokens. In fp16 one look
//! at the largest magnitudes of hidden and weight.
//!
//! *When it acts*: where it is called. Under autocast the products are in its dtype and the
//! softmax in fp32, as in the plain form. Products in fp16 run between two scales, powers of two
//! that fit the tensors, so that no sum in them overflows before a loss scale can act; backward
//! undoes them in fp32.
//!
//! *Limits*: no second derivative ([`Error::Unsupported`](crate::Error::Unsupported)). Half-precision rows are rounded
//! once per product, so they differ from the plain form by that dtype's rounding. Inside a
//! checkpointed segment all three products are run twice; it saves nothing there, call it
//! outside. A forward with gradients on that has no backward has paid for them. On accelerators
//! it is made of libtorch's operators, tested on the CPU only. The gradients it holds between
//! forward and backward are not offered to `CpuOffload::activations`.
//!
//! ```
//! use memfit::loss::linear_cross_entropy;
//! use memfit::{Stack, optim::{AdamW, AdamWConfig}};
//! use memfit::tch::{Device, Kind, Tensor, nn};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let head = nn::linear(vs.root(), 16, 1_000, nn::LinearConfig { bias: false, ..Default::default() });
//! let mut training = Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default())?).build()?;
//! let hidden = Tensor::randn([2, 32, 16], (Kind::Float, Device::Cpu));
//! let targets = Tensor::randint(1_000, [2, 32], (Kind::Int64, Device::Cpu));
//! let outcome =
//!     training.step_with(|| Ok(linear_cross_entropy(&hidden, &head.ws, &targets)?.into_loss()))?;
//! assert!(outcome.stepped());
//! # Ok::<(), memfit::Error>(())
//! ```

mod evaluation;
mod inputs;
mod linear_cross_entropy;
mod range;

pub use evaluation::{Evaluation, evaluate_cross_entropy};
pub use inputs::Inputs;
pub use linear_cross_entropy::{
    LinearCrossEntropy, LinearCrossEntropyConfig, Reduction, TokenLoss, linear_cross_entropy,
};
