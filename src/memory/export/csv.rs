use std::fmt::Write;
use std::time::Duration;

use super::escape::csv;
use crate::memory::role::Role;
use crate::memory::timeline::{Block, Refusal, Timeline};

const MADE: &str = "alloc";
const FREED: &str = "free";

impl Timeline {
    /// One line per allocation, free and refused request: time, what happened, bytes, what the
    /// block is for, phase, step and segment of that moment, live bytes afterwards in all and by
    /// role.
    pub fn csv(&self) -> String {
        let mut out = "time_us,event,block,bytes,role,phase,step,segment,live_bytes".to_owned();
        for role in Role::ALL {
            let _ = write!(out, ",live_{}", role.name().replace(' ', "_"));
        }
        out.push_str("\r\n");
        let mut refusals = self.refusals.iter().peekable();
        for (index, event, block) in self.events() {
            let time = self.moments[index + 1].time;
            while let Some(refusal) = refusals.next_if(|refusal| refusal.time <= time) {
                self.refused(&mut out, refusal);
            }
            self.happened(&mut out, index, event, block);
        }
        refusals.for_each(|refusal| self.refused(&mut out, refusal));
        out
    }

    /// Allocations and frees in order, each with the number of its event.
    fn events(&self) -> Vec<(usize, &'static str, &Block)> {
        let mut events = Vec::with_capacity(self.moments.len());
        for block in &self.blocks {
            events.extend(block.born.map(|at| (at, MADE, block)));
            events.extend(block.died.map(|at| (at, FREED, block)));
        }
        events.sort_unstable_by_key(|(at, _, _)| *at);
        events
    }

    fn happened(&self, out: &mut String, index: usize, event: &str, block: &Block) {
        let moment = self.moments[index + 1];
        let made_here = block.phase.filter(|_| event == MADE);
        let during = match made_here {
            Some(phase) => place(phase.name(), block.step, block.segment.as_deref()),
            None => self.during(moment.time),
        };
        let Block { number, bytes, .. } = block;
        let (time, role) = (micros(moment.time), block.role.name());
        let _ = write!(out, "{time:.3},{event},{number},{bytes},{role},{during},{}", moment.live);
        for (_, bytes) in moment.roles.iter() {
            let _ = write!(out, ",{bytes}");
        }
        out.push_str("\r\n");
    }

    /// No block, and the live bytes of all roles alone.
    fn refused(&self, out: &mut String, refusal: &Refusal) {
        let (time, during) = (micros(refusal.time), self.during(refusal.time));
        let _ = write!(out, "{time:.3},refused,,{},,{during},{}", refusal.bytes, refusal.live);
        out.push_str(&",".repeat(Role::ALL.len()));
        out.push_str("\r\n");
    }

    fn during(&self, time: Duration) -> String {
        match self.span_at(time) {
            Some(span) => place(span.phase.name(), span.step, span.segment.as_deref()),
            None => ",,".to_owned(),
        }
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn place(phase: &str, step: u32, segment: Option<&str>) -> String {
    format!("{phase},{step},{}", csv(segment.unwrap_or_default()))
}
