//! What forward saves for backward passes through a chain of links, each of which may keep it
//! elsewhere or not at all.
//!
//! **Order.** Links stand on a stack per thread. A tensor that an operator saves is offered to
//! the innermost link first and passes outward until one takes it:
//!
//! 1. A recompute region (`memfit::checkpoint`) takes everything, parameters
//!    too: it keeps none of it and computes it again. Its *inputs* are offered to the links
//!    outside it, so offload and recompute chain.
//! 2. Any other [`Link`] is offered what is not a parameter. Parameters, buffers and their
//!    views are recognised by the identity of their storage ([`register`]), never by address
//!    alone; leaves that require a gradient count as parameters by themselves.
//! 3. What nobody takes is kept by reference, detached, with its version.
//!
//! Work that a link does is hidden from all links and records no gradients.
//!
//! **Versions.** libtorch checks no version of a tensor that went through a hook, so the chain
//! does: what is kept by reference must be unchanged when backward asks for it, else backward
//! fails with [`Error::Modified`](crate::Error::Modified).
//!
//! *Cost*: no link, no cost: one thread-local read per saved tensor. With a link, about 0.2 µs
//! per saved tensor beside what the link does. *When it acts*: while a guard lives, on its
//! thread; graphs made then keep what they hold until they are used or dropped. *Limits*: one
//! engine per process: the first push replaces libtorch's default engine by one that asks the
//! links.
//!
//! ```
//! use memfit::saved::Link;
//! use memfit::tch::{Device, Kind, Tensor};
//!
//! let halves = Link::new(|tensor| {
//!     let small = tensor.f_to_kind(Kind::Half)?;
//!     let kind = tensor.kind();
//!     Ok(Some(Box::new(move || Ok(small.f_to_kind(kind)?))))
//! });
//! let x = Tensor::full([4], 2.0, (Kind::Float, Device::Cpu)).set_requires_grad(true);
//! let guard = halves.push();
//! let y = (&x * 1.5).square().sum(Kind::Float);
//! drop(guard);
//! y.backward();
//! assert_eq!(x.grad().double_value(&[0]), 9.0);
//! ```

pub use crate::ffi::saved::{Link, LinkGuard, Pause, Registration, Unpack, is_parameter, pause, register};
