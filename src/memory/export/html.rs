use std::collections::HashMap;

use serde_json::{Value, json};

use super::escape::{script, xml};
use crate::memory::chart::{STACKED, color_of, color_of_phase};
use crate::memory::phase::Phase;
use crate::memory::tables::shown;
use crate::memory::timeline::Timeline;

const PAGE: &str = include_str!("page.html");

impl Timeline {
    /// A page that needs no network and no other file. Hover, or move with the arrow keys, to
    /// see who holds the bytes of a moment; drag or turn the wheel to zoom.
    pub fn html(&self) -> String {
        let title = xml(&self.title());
        let data = script(&self.data().to_string());
        PAGE.replacen("__TITLE__", &title, 2).replacen("__DATA__", &data, 1)
    }

    /// What the page draws from. Blocks are `[born, died, bytes, role, segment]`, the first two
    /// as numbers of moments, -1 for before and after.
    fn data(&self) -> Value {
        let mut segments = Segments::default();
        let moment = |event: Option<usize>| event.map_or(-1, |event| event as i64 + 1);
        let place = |role| STACKED.iter().position(|stacked| *stacked == role);
        let blocks: Vec<Value> = self
            .blocks
            .iter()
            .map(|block| {
                let segment = segments.number(block.segment.as_deref());
                json!([moment(block.born), moment(block.died), block.bytes, place(block.role), segment])
            })
            .collect();
        let spans: Vec<Value> = self
            .spans
            .iter()
            .map(|span| {
                let segment = segments.number(span.segment.as_deref());
                json!([
                    span.phase as u8,
                    span.step,
                    segment,
                    span.start.as_nanos() as u64,
                    span.end.as_nanos() as u64
                ])
            })
            .collect();
        let refusals: Vec<Value> = self
            .refusals
            .iter()
            .map(|one| json!([one.time.as_nanos() as u64, one.bytes, one.live]))
            .collect();
        json!({
            "title": self.title(),
            "roles": STACKED.iter().map(|role| json!([role.name(), hex(color_of(*role))])).collect::<Vec<_>>(),
            "phases": Phase::ALL.iter().map(|one| json!([one.name(), hex(color_of_phase(*one))])).collect::<Vec<_>>(),
            "times": self.moments.iter().map(|moment| moment.time.as_nanos() as u64).collect::<Vec<_>>(),
            "live": self.moments.iter().map(|moment| moment.live).collect::<Vec<_>>(),
            "length": self.length.as_nanos() as u64,
            "peak": self.peak,
            "blocks": blocks,
            "spans": spans,
            "refusals": refusals,
            "segments": segments.names,
        })
    }
}

fn hex([red, green, blue]: [u8; 3]) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

/// Each name once.
#[derive(Default)]
struct Segments {
    names: Vec<String>,
    numbers: HashMap<String, i64>,
}

impl Segments {
    fn number(&mut self, name: Option<&str>) -> i64 {
        let Some(name) = name else { return -1 };
        let next = self.names.len() as i64;
        *self.numbers.entry(name.to_owned()).or_insert_with(|| {
            self.names.push(shown(name));
            next
        })
    }
}
