use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

use tch::{Device, Tensor};

use super::phase::{Phase, name_of, segment_names, segment_of, step_of};
use super::tables::{amount, shown};
use crate::error::{Error, Result};
use crate::ffi::timeline::{self as ffi, Census};

/// Asserts that the memory made while it is open comes back, and names who kept it.
///
/// *Cost*: about 0.1 µs per allocation and free on the CPU while it is open; no memory.
///
/// *Limits*: sites are named on the CPU; on another device live bytes are compared alone. What
/// other threads make meanwhile counts, too: let prefetching rest. Memory is what is counted: a
/// block that took the place of one freed meanwhile, as gradients that are dropped and made again,
/// is new and needs [`LeakScope::check_except`]; a view that is kept of older memory has none of
/// its own.
///
/// ```
/// use memfit::{Error, memory::{LeakScope, Phase}};
/// use tch::{Device, Kind, Tensor};
///
/// let scope = LeakScope::new()?;
/// let kept = { let _in = Phase::Forward.enter_step(7); Tensor::zeros([256], (Kind::Float, Device::Cpu)) };
/// let Err(Error::Leak { bytes, sites, .. }) = scope.check() else { panic!("the tensor is still alive") };
/// assert_eq!((bytes, sites[0].phase, sites[0].step), (1024, Phase::Forward, 7));
/// scope.check_except([&kept])?;
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "a scope that is not checked asserts nothing"]
pub struct LeakScope {
    census: Census,
    /// Blocks up to this number are older than the scope.
    last: u64,
    devices: Vec<(Device, u64)>,
}

/// Where memory was made that did not come back.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Site {
    /// The step that made it, modulo 2³².
    pub step: u32,
    /// The phase that made it.
    pub phase: Phase,
    /// The segment that made it.
    pub segment: Option<String>,
    /// Bytes of each block.
    pub size: u64,
    /// How many such blocks there are.
    pub blocks: u64,
}

impl LeakScope {
    /// Starts watching.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where another CPU allocator has taken the counting one's place.
    pub fn new() -> Result<Self> {
        super::counted()?;
        let census = Census::open();
        let last = crate::ffi::memory::stats().allocations;
        let accelerators = (0..crate::ffi::device::count()).map(Device::Cuda);
        let devices = accelerators.filter_map(|one| Some((one, super::stats(one).ok()?.current))).collect();
        Ok(Self { census, last, devices })
    }

    /// Whether all came back that was made since the scope began.
    ///
    /// # Errors
    /// [`Error::Leak`] with the sites of what is still alive, the most bytes first.
    pub fn check(&self) -> Result<()> {
        self.check_except([])
    }

    /// As [`LeakScope::check`], apart from tensors that are meant to stay.
    ///
    /// # Errors
    /// As [`LeakScope::check`].
    pub fn check_except<'a>(&self, kept: impl IntoIterator<Item = &'a Tensor>) -> Result<()> {
        let kept: Vec<&Tensor> = kept.into_iter().collect();
        let mut stays = self.devices.clone();
        for (device, bytes) in &mut stays {
            let there = kept.iter().filter(|tensor| tensor.device() == *device);
            *bytes += there.map(|tensor| crate::ffi::storage::nbytes(tensor) as u64).sum::<u64>();
        }
        let kept = ffi::blocks_of(kept, false);
        let names = segment_names();
        let mut sites: BTreeMap<(u32, Phase, u16, u64), u64> = BTreeMap::new();
        let alive = self.census.read();
        let ours = alive.iter().filter(|one| one.block > self.last);
        for one in ours.filter(|one| kept.iter().all(|kept| kept.number != one.block)) {
            let key = (step_of(one.word), Phase::of(one.word), segment_of(one.word), one.bytes);
            *sites.entry(key).or_default() += 1;
        }
        let mut sites: Vec<Site> = sites
            .into_iter()
            .map(|((step, phase, segment, size), blocks)| {
                let segment = name_of(&names, segment).map(str::to_owned);
                Site { step, phase, segment, size, blocks }
            })
            .collect();
        sites.sort_by_key(|site| std::cmp::Reverse(site.size * site.blocks));
        let on_devices = stays.iter().map(|(device, stays)| {
            super::stats(*device).map_or(0, |stats| stats.current.saturating_sub(*stays))
        });
        let bytes = sites.iter().map(|site| site.size * site.blocks).sum::<u64>() + on_devices.sum::<u64>();
        if bytes == 0 {
            return Ok(());
        }
        Err(Error::Leak { bytes, blocks: sites.iter().map(|site| site.blocks).sum(), sites })
    }
}

/// One line.
impl Display for Site {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} made in {} of step {}",
            self.blocks,
            amount(self.size),
            self.phase.name(),
            self.step
        )?;
        match &self.segment {
            None => Ok(()),
            Some(segment) => write!(f, ", segment {}", shown(segment)),
        }
    }
}

/// The first of the sites, for an error's text.
pub(crate) fn listed(sites: &[Site]) -> String {
    let mut text = String::new();
    for site in sites.iter().take(5) {
        text.push_str(&format!("; {site}"));
    }
    if sites.len() > 5 {
        text.push_str(&format!("; and {} sites more", sites.len() - 5));
    }
    text
}
