use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use tch::Tensor;
use tch::nn::{Module, ModuleT};

use super::activation::{Plain, WithTrain};
use super::checkpointer::{Checkpointer, Plan, check_cover};
use super::segment::{EarlyStop, Segment, caught};
use super::shared::Shared;
use crate::error::{Error, Result};
use crate::saved::Link;
use crate::step::unwind;

type Blocks = Vec<Box<dyn ModuleT>>;

/// Blocks in a row, each with one tensor in and one out, run as a [`Checkpointer`] decides.
///
/// Made with [`CheckpointChain::new`] it is a [`Module`], with
/// [`CheckpointChain::with_train`] a [`ModuleT`].
///
/// ```
/// use memfit::checkpoint::{CheckpointChain, Ranges};
/// use memfit::tch::nn::{self, Module};
/// use memfit::tch::{Device, Kind, Tensor};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let blocks = (0..9).map(|i| nn::linear(vs.root() / i, 8, 8, Default::default())).collect();
/// let chain = CheckpointChain::new(blocks, &Ranges::new(3)?)?;
/// let x = Tensor::ones([2, 8], (Kind::Float, Device::Cpu));
/// chain.forward(&x).sum(Kind::Float).backward();
/// assert_eq!(chain.recomputes(), 3);
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Debug)]
pub struct CheckpointChain<K = Plain> {
    blocks: Shared<Blocks>,
    decision: Vec<Plan>,
    nodes: Arc<[Node]>,
    segment: Segment,
    link: Option<Link>,
    kind: PhantomData<fn() -> K>,
}

/// A plan, ready to run: shared with the closures of the ranges it recomputes.
#[derive(Debug)]
enum Node {
    Keep(Range<usize>),
    Recompute { segment: Segment, offload: bool, inner: Arc<[Node]> },
}

impl CheckpointChain<Plain> {
    /// A chain of modules without a train flag.
    ///
    /// # Errors
    /// Those of the checkpointer, and a decision that does not cover the chain.
    pub fn new<M: Module + 'static>(blocks: Vec<M>, checkpointer: &dyn Checkpointer) -> Result<Self> {
        Self::decide(blocks.into_iter().map(|block| Box::new(block) as _).collect(), checkpointer)
    }

    /// As `forward`, with errors as values.
    ///
    /// # Errors
    /// What a block panics with, and a device whose generator cannot be captured.
    pub fn try_forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.execute(xs, false)
    }
}

impl CheckpointChain<WithTrain> {
    /// A chain of modules with a train flag.
    ///
    /// # Errors
    /// Those of [`CheckpointChain::new`].
    pub fn with_train<M: ModuleT + 'static>(blocks: Vec<M>, checkpointer: &dyn Checkpointer) -> Result<Self> {
        Self::decide(blocks.into_iter().map(|block| Box::new(block) as _).collect(), checkpointer)
    }

    /// A chain of blocks of different types.
    ///
    /// # Errors
    /// Those of [`CheckpointChain::new`].
    pub fn boxed(blocks: Vec<Box<dyn ModuleT>>, checkpointer: &dyn Checkpointer) -> Result<Self> {
        Self::decide(blocks, checkpointer)
    }

    /// As `forward_t`, with errors as values.
    ///
    /// # Errors
    /// What a block panics with, and a device whose generator cannot be captured.
    pub fn try_forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.execute(xs, train)
    }
}

impl<K> CheckpointChain<K> {
    fn decide(blocks: Blocks, checkpointer: &dyn Checkpointer) -> Result<Self> {
        let decision = checkpointer.decide(blocks.len())?;
        check_cover(&decision, 0..blocks.len())?;
        let segment = Segment::named("chain");
        let nodes = nodes(&decision, &segment)?;
        Ok(Self { blocks: Shared::new(blocks), decision, nodes, segment, link: None, kind: PhantomData })
    }

    /// Names the chain in errors, which add the range: `encoder 2..4`.
    ///
    /// # Errors
    /// None of its own.
    pub fn named(self, name: impl Into<String>) -> Result<Self> {
        self.with_segment(|segment| segment.renamed(name))
    }

    /// Compares values between forward and recompute; see [`Segment::checked`].
    ///
    /// # Errors
    /// None of its own.
    pub fn checked(self) -> Result<Self> {
        self.with_segment(Segment::checked)
    }

    /// Sets when a recompute ends.
    ///
    /// # Errors
    /// None of its own.
    pub fn early_stop(self, early_stop: EarlyStop) -> Result<Self> {
        self.with_segment(|segment| segment.early_stop(early_stop))
    }

    fn with_segment(mut self, change: impl FnOnce(Segment) -> Segment) -> Result<Self> {
        self.segment = change(self.segment);
        self.nodes = nodes(&self.decision, &self.segment)?;
        Ok(self)
    }

    /// The link that takes the inputs of ranges under [`Plan::OffloadInput`].
    pub fn offload_through(mut self, link: Link) -> Self {
        self.link = Some(link);
        self
    }

    /// What was decided.
    pub fn decision(&self) -> &[Plan] {
        &self.decision
    }

    /// How many recomputes of its ranges have run, nested ones too.
    pub fn recomputes(&self) -> u64 {
        self.segment.recomputes()
    }

    /// Lends the blocks.
    ///
    /// # Errors
    /// Those of [`Shared::with`].
    pub fn with<R>(&self, f: impl FnOnce(&[Box<dyn ModuleT>]) -> R) -> Result<R> {
        self.blocks.with(|blocks| f(blocks))
    }

    fn execute(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        let held = self.blocks.lock()?;
        run(&self.nodes, &held, &self.blocks, self.link.as_ref(), xs, train)
    }
}

fn nodes(plans: &[Plan], of: &Segment) -> Result<Arc<[Node]>> {
    plans.iter().map(|plan| node(plan, of, false)).collect::<Result<Vec<_>>>().map(Arc::from)
}

fn node(plan: &Plan, of: &Segment, offload: bool) -> Result<Node> {
    match plan {
        Plan::Keep(range) => Ok(Node::Keep(range.clone())),
        Plan::Recompute { range, inner } => Ok(Node::Recompute {
            segment: of.clone().renamed(format!("{} {}..{}", of.name(), range.start, range.end)),
            offload,
            inner: nodes(inner, of)?,
        }),
        Plan::OffloadInput(inner) => node(inner, of, true),
        Plan::KeepOperators { .. } => Err(Error::Unsupported {
            what: "keeping the outputs of chosen operators".to_owned(),
            place: "in this version".to_owned(),
            remedy: "keep the segment, or recompute it".to_owned(),
        }),
    }
}

fn run(
    nodes: &[Node],
    blocks: &Blocks,
    shared: &Shared<Blocks>,
    link: Option<&Link>,
    xs: &Tensor,
    train: bool,
) -> Result<Tensor> {
    let mut xs = xs.shallow_clone();
    for node in nodes {
        xs = match node {
            Node::Keep(range) => {
                let kept =
                    || Ok(blocks[range.clone()].iter().fold(xs, |xs, block| block.forward_t(&xs, train)));
                caught(kept, "a kept block")?
            }
            Node::Recompute { segment, offload, inner } => {
                let link = link.filter(|_| *offload);
                if *offload && link.is_none() {
                    return Err(Error::config("Plan", "OffloadInput needs CheckpointChain::offload_through"));
                }
                let (inner, handle) = (inner.clone(), shared.clone());
                segment.run_through(link, shared, &xs, move |blocks, xs| {
                    run(&inner, blocks, &handle, None, xs, train)
                })?
            }
        };
    }
    Ok(xs)
}

impl Module for CheckpointChain<Plain> {
    fn forward(&self, xs: &Tensor) -> Tensor {
        self.try_forward(xs).unwrap_or_else(|error| unwind(error))
    }
}

impl ModuleT for CheckpointChain<WithTrain> {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        self.try_forward_t(xs, train).unwrap_or_else(|error| unwind(error))
    }
}
