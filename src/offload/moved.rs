use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::carrier::Carrier;

/// What an offload has carried so far.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes copied out, since the offload was made.
    pub out_bytes: u64,
    /// Bytes brought back.
    pub in_bytes: u64,
    /// Copies out.
    pub copies_out: u64,
    /// Copies back.
    pub copies_in: u64,
    /// Bytes in pinned host memory now.
    pub live_on_host: u64,
    /// Bytes on the disk now, in whole pages.
    pub live_on_disk: u64,
    /// Most bytes on the disk at a time, in whole pages.
    pub peak_on_disk: u64,
}

/// Watches an offload from outside, also after it went into a stack.
#[derive(Clone, Debug, Default)]
pub struct Observer {
    counters: Arc<Counters>,
}

#[derive(Debug, Default)]
struct Counters {
    out_bytes: AtomicU64,
    in_bytes: AtomicU64,
    copies_out: AtomicU64,
    copies_in: AtomicU64,
    carrier: std::sync::OnceLock<Arc<Carrier>>,
}

impl Observer {
    /// What was carried so far.
    pub fn moved(&self) -> Moved {
        let counters = &self.counters;
        let carrier = counters.carrier.get();
        let disk = carrier.and_then(|carrier| carrier.disk());
        let (live_on_disk, peak_on_disk) = disk.map(|disk| disk.live_and_peak()).unwrap_or_default();
        Moved {
            out_bytes: counters.out_bytes.load(Ordering::Relaxed),
            in_bytes: counters.in_bytes.load(Ordering::Relaxed),
            copies_out: counters.copies_out.load(Ordering::Relaxed),
            copies_in: counters.copies_in.load(Ordering::Relaxed),
            live_on_host: carrier.map(|carrier| carrier.host_live()).unwrap_or_default(),
            live_on_disk,
            peak_on_disk,
        }
    }

    pub(crate) fn watch(&self, carrier: &Arc<Carrier>) {
        let _ = self.counters.carrier.set(carrier.clone());
    }

    pub(crate) fn count_out(&self, bytes: u64) {
        self.counters.out_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.counters.copies_out.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_in(&self, bytes: u64) {
        self.counters.in_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.counters.copies_in.fetch_add(1, Ordering::Relaxed);
    }
}
