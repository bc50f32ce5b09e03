use std::fmt::Write;

use super::escape::csv;
use crate::memory::role::Role;
use crate::memory::timeline::{Block, Timeline};

impl Timeline {
    /// One line per allocation and free: time, what happened, bytes, live bytes afterwards in
    /// all and by role, and what the block is for.
    pub fn csv(&self) -> String {
        let mut out = "time_us,event,block,bytes,role,phase,step,segment,live_bytes".to_owned();
        for role in Role::ALL {
            let _ = write!(out, ",live_{}", role.name().replace(' ', "_"));
        }
        out.push_str("\r\n");
        for (index, event, block) in self.events() {
            let moment = self.moments[index + 1];
            let _ = write!(
                out,
                "{:.3},{event},{},{},{},{},{},{},{}",
                moment.time.as_secs_f64() * 1e6,
                block.number,
                block.bytes,
                block.role.name(),
                block.phase.map_or("", |phase| phase.name()),
                block.phase.map(|_| block.step.to_string()).unwrap_or_default(),
                csv(block.segment.as_deref().unwrap_or_default()),
                moment.live
            );
            for (_, bytes) in moment.roles.iter() {
                let _ = write!(out, ",{bytes}");
            }
            out.push_str("\r\n");
        }
        out
    }

    /// Allocations and frees in order, each with the number of its event.
    pub(super) fn events(&self) -> Vec<(usize, &'static str, &Block)> {
        let mut events = Vec::with_capacity(self.moments.len());
        for block in &self.blocks {
            events.extend(block.born.map(|at| (at, "alloc", block)));
            events.extend(block.died.map(|at| (at, "free", block)));
        }
        events.sort_unstable_by_key(|(at, _, _)| *at);
        events
    }
}
