use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

use crate::memory::phase::Phase;
use crate::memory::role::Role;
use crate::memory::timeline::{Moment, Timeline};

const PHASES: u32 = 1;
const SEGMENTS: u32 = 2;

impl Timeline {
    /// A trace in the trace-event format, for Perfetto or `chrome://tracing`: a counter of live
    /// bytes by role, a row of phases, a row of segments, and marks for the peak and for refused
    /// requests.
    pub fn trace(&self) -> String {
        let mut out = String::from("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
        for event in self.slices() {
            line(&mut out, &event.to_string());
        }
        let highest = self.highest();
        let roles: Vec<Role> = Role::ALL.into_iter().filter(|role| highest[*role] > 0).collect();
        for moment in &self.moments {
            counter(&mut out, moment, &roles);
        }
        for event in self.marks() {
            line(&mut out, &event.to_string());
        }
        out.truncate(out.trim_end_matches([',', '\n']).len());
        out + "\n]}\n"
    }

    fn slices(&self) -> impl Iterator<Item = Value> {
        let names = [
            named("process_name", 0, "memfit"),
            named("thread_name", PHASES, "phases"),
            named("thread_name", SEGMENTS, "segments"),
        ];
        let spans = self.spans.iter().flat_map(|span| {
            let slice = |thread: u32, name: &str, category: &str| {
                json!({
                    "name": name, "cat": category, "ph": "X", "pid": 1, "tid": thread,
                    "ts": micros(span.start), "dur": micros(span.end.saturating_sub(span.start)),
                    "args": { "step": span.step },
                })
            };
            let phase = (span.phase != Phase::Idle).then(|| slice(PHASES, span.phase.name(), "phase"));
            let segment = span.segment.as_ref().map(|segment| slice(SEGMENTS, segment, "segment"));
            phase.into_iter().chain(segment)
        });
        names.into_iter().chain(spans)
    }

    fn marks(&self) -> impl Iterator<Item = Value> {
        let peak = self.peak();
        let refusals = self.refusals.iter().map(|refusal| {
            let args = json!({ "bytes asked for": refusal.bytes, "live bytes": refusal.live });
            instant("out of memory", refusal.time, args)
        });
        std::iter::once(instant("peak", peak.time, json!({ "bytes": peak.bytes }))).chain(refusals)
    }
}

fn line(out: &mut String, event: &str) {
    out.push_str(event);
    out.push_str(",\n");
}

fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

fn named(what: &str, thread: u32, name: &str) -> Value {
    json!({ "name": what, "ph": "M", "pid": 1, "tid": thread, "args": { "name": name } })
}

/// Written at once: there are as many as events, and names of roles need no escapes.
fn counter(out: &mut String, moment: &Moment, roles: &[Role]) {
    let time = micros(moment.time);
    let _ = write!(out, "{{\"name\":\"live bytes\",\"ph\":\"C\",\"pid\":1,\"ts\":{time:.3},\"args\":{{");
    for (index, role) in roles.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        let _ = write!(out, "{comma}\"{}\":{}", role.name(), moment.roles[*role]);
    }
    out.push_str("}},\n");
}

fn instant(name: &str, time: Duration, args: Value) -> Value {
    json!({ "name": name, "ph": "i", "s": "p", "pid": 1, "tid": PHASES, "ts": micros(time), "args": args })
}
