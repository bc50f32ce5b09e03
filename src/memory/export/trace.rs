use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::memory::phase::Phase;
use crate::memory::timeline::{Moment, Timeline};

const PHASES: u32 = 1;
const SEGMENTS: u32 = 2;

impl Timeline {
    /// A trace in the trace-event format, for Perfetto or `chrome://tracing`: a counter of live
    /// bytes by role, a row of phases, a row of segments, and marks for the peak and for refused
    /// requests.
    pub fn trace(&self) -> String {
        let mut events = vec![
            named("process_name", 0, "memfit"),
            named("thread_name", PHASES, "phases"),
            named("thread_name", SEGMENTS, "segments"),
        ];
        let mut slice = |thread: u32, name: &str, category: &str, step: u32, from: Duration, to: Duration| {
            events.push(json!({
                "name": name, "cat": category, "ph": "X", "pid": 1, "tid": thread,
                "ts": micros(from), "dur": micros(to.saturating_sub(from)), "args": { "step": step },
            }));
        };
        for span in &self.spans {
            if span.phase != Phase::Idle {
                slice(PHASES, span.phase.name(), "phase", span.step, span.start, span.end);
            }
            if let Some(segment) = &span.segment {
                slice(SEGMENTS, segment, "segment", span.step, span.start, span.end);
            }
        }
        events.extend(self.moments.iter().map(counter));
        let peak = self.peak();
        events.push(instant("peak", peak.time, json!({ "bytes": peak.bytes })));
        for refusal in &self.refusals {
            let args = json!({ "bytes asked for": refusal.bytes, "live bytes": refusal.live });
            events.push(instant("out of memory", refusal.time, args));
        }
        json!({ "traceEvents": events, "displayTimeUnit": "ms" }).to_string()
    }
}

fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

fn named(what: &str, thread: u32, name: &str) -> Value {
    json!({ "name": what, "ph": "M", "pid": 1, "tid": thread, "args": { "name": name } })
}

fn counter(moment: &Moment) -> Value {
    let roles: Map<String, Value> =
        moment.roles.iter().map(|(role, bytes)| (role.name().to_owned(), json!(bytes))).collect();
    json!({ "name": "live bytes", "ph": "C", "pid": 1, "ts": micros(moment.time), "args": roles })
}

fn instant(name: &str, time: Duration, args: Value) -> Value {
    json!({ "name": name, "ph": "i", "s": "p", "pid": 1, "tid": PHASES, "ts": micros(time), "args": args })
}
