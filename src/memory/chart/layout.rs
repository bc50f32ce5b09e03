//! What stands where in the chart.

use std::time::Duration;

use super::colors::{STACKED, color_of, color_of_phase};
use super::{Anchor, Color, Scene, Shape, Stroke, Text, Weight};
use crate::memory::phase::Phase;
use crate::memory::tables::{amount, shown};
use crate::memory::timeline::{Holder, Moment, Span, Timeline};

const WIDTH: usize = 1280;
const HEIGHT: usize = 720;
const LEFT: f64 = 96.0;
const TOP: f64 = 92.0;
const PLOT_WIDTH: usize = 850;
const PLOT_HEIGHT: f64 = 470.0;
const BOTTOM: f64 = TOP + PLOT_HEIGHT;
const BAND: f64 = 24.0;
/// Points that one letter of the font takes.
pub(super) const LETTER: f64 = 8.0;

pub(super) const INK: Color = [0x22, 0x22, 0x22];
pub(super) const PALE: Color = [0x66, 0x66, 0x66];
pub(super) const GRID: Color = [0xe2, 0xe2, 0xe2];
const ALARM: Color = [0xc0, 0x00, 0x20];

/// The chart of a timeline.
pub(super) fn scene(timeline: &Timeline) -> Scene {
    let plot = Plot::new(timeline);
    let title = timeline.title();
    let mut shapes = Vec::new();
    heading(&mut shapes, timeline, &title);
    plot.grid(&mut shapes);
    plot.areas(&mut shapes);
    plot.time_axis(&mut shapes);
    plot.bands(&mut shapes);
    plot.refusals(&mut shapes);
    plot.peak(&mut shapes);
    legend(&mut shapes, timeline);
    phases(&mut shapes, timeline);
    Scene { width: WIDTH, height: HEIGHT, title, shapes }
}

fn heading(shapes: &mut Vec<Shape>, timeline: &Timeline, title: &str) {
    shapes.push(text(LEFT, 32.0, Anchor::Start, Weight::Bold, INK, title));
    let line = format!(
        "live bytes of libtorch's CPU allocator, stacked by what they are for; {} blocks in {}",
        timeline.blocks.iter().filter(|block| block.born.is_some()).count(),
        milliseconds(timeline.length)
    );
    let line = if timeline.lost > 0 { format!("{line}; {} older events lost", timeline.lost) } else { line };
    shapes.push(text(LEFT, 54.0, Anchor::Start, Weight::Regular, PALE, line));
}

struct Plot<'a> {
    timeline: &'a Timeline,
    length: f64,
    /// Bytes at the plot's upper edge, between two lines of the grid, and their unit.
    most: f64,
    every: f64,
    unit: (f64, &'static str),
}

impl<'a> Plot<'a> {
    fn new(timeline: &'a Timeline) -> Self {
        let peak = timeline.moments[timeline.peak].live as f64;
        let unit = unit_of(peak);
        let every = round_step(peak.max(1.0) * 1.12 / unit.0, 6.0) * unit.0;
        let most = (peak.max(1.0) * 1.12 / every).ceil() * every;
        Self { timeline, length: timeline.length.as_secs_f64().max(1e-9), most, every, unit }
    }

    fn x(&self, time: Duration) -> f64 {
        LEFT + (time.as_secs_f64() / self.length).clamp(0.0, 1.0) * PLOT_WIDTH as f64
    }

    fn y(&self, bytes: f64) -> f64 {
        BOTTOM - bytes / self.most * PLOT_HEIGHT
    }

    fn grid(&self, shapes: &mut Vec<Shape>) {
        let right = LEFT + PLOT_WIDTH as f64;
        shapes.push(text(LEFT - 8.0, TOP - 20.0, Anchor::End, Weight::Regular, PALE, "live bytes"));
        for line in 0..=(self.most / self.every).round() as u32 {
            let bytes = f64::from(line) * self.every;
            let y = self.y(bytes);
            let (from, to) = ((LEFT, y), (right, y));
            shapes.push(Shape::Line { from, to, color: GRID, stroke: Stroke::Solid });
            let label = format!("{} {}", short(bytes / self.unit.0), self.unit.1);
            shapes.push(text(LEFT - 8.0, y + 4.0, Anchor::End, Weight::Regular, PALE, label));
        }
    }

    /// The moment with the most live bytes of each column.
    fn columns(&self) -> Vec<Moment> {
        let moments = &self.timeline.moments;
        let mut next = 0;
        (0..PLOT_WIDTH)
            .map(|column| {
                let end = self.length * (column + 1) as f64 / PLOT_WIDTH as f64;
                let mut highest = moments[next.max(1) - 1];
                while let Some(moment) = moments.get(next).filter(|moment| moment.time.as_secs_f64() <= end) {
                    if moment.live > highest.live || next == 0 {
                        highest = *moment;
                    }
                    next += 1;
                }
                highest
            })
            .collect()
    }

    fn areas(&self, shapes: &mut Vec<Shape>) {
        let columns = self.columns();
        let mut below = vec![0.0; columns.len()];
        for role in STACKED {
            let spans: Vec<(f64, f64)> = columns
                .iter()
                .zip(&mut below)
                .map(|(moment, below)| {
                    let bottom = self.y(*below);
                    *below += moment.roles[role] as f64;
                    (self.y(*below), bottom)
                })
                .collect();
            if columns.iter().any(|moment| moment.roles[role] > 0) {
                let (color, name) = (color_of(role), role.name());
                shapes.push(Shape::Area { x: LEFT, columns: spans, color, name });
            }
        }
    }

    fn time_axis(&self, shapes: &mut Vec<Shape>) {
        let (scale, unit) = match self.length {
            short if short < 2e-3 => (1e6, "us"),
            long if long >= 10.0 => (1.0, "s"),
            _ => (1e3, "ms"),
        };
        let every = round_step(self.length * scale, 8.0);
        let y = BOTTOM + 2.0 * BAND + 12.0;
        for tick in 0..=(self.length * scale / every).floor() as u32 {
            let at = f64::from(tick) * every;
            let x = LEFT + at / (self.length * scale) * PLOT_WIDTH as f64;
            let (from, to) = ((x, y), (x, y + 5.0));
            shapes.push(Shape::Line { from, to, color: PALE, stroke: Stroke::Solid });
            shapes.push(text(x, y + 20.0, Anchor::Middle, Weight::Regular, PALE, short(at)));
        }
        let middle = LEFT + PLOT_WIDTH as f64 / 2.0;
        let label = format!("time since the timeline's start, {unit}");
        shapes.push(text(middle, y + 42.0, Anchor::Middle, Weight::Regular, PALE, label));
    }

    /// The phases and, below them, the segments.
    fn bands(&self, shapes: &mut Vec<Shape>) {
        let label = |shapes: &mut Vec<Shape>, row: f64, name: &str| {
            let y = BOTTOM + row * BAND + 25.0;
            shapes.push(text(LEFT - 8.0, y, Anchor::End, Weight::Regular, PALE, name));
        };
        label(shapes, 0.0, "phase");
        self.band(shapes, 0.0, &merged(&self.timeline.spans, |span| span.phase), |span| {
            (Some(span.phase.name().to_owned()), color_of_phase(span.phase))
        });
        if self.timeline.spans.iter().any(|span| span.segment.is_some()) {
            label(shapes, 1.0, "segment");
            let spans = merged(&self.timeline.spans, |span| (span.phase, span.segment.clone()));
            self.band(shapes, 1.0, &spans, |span| {
                let named = span.segment.is_some();
                let color = if named { color_of_phase(span.phase) } else { [0xf6, 0xf6, 0xf6] };
                (span.segment.as_deref().map(shown), color)
            });
        }
    }

    fn band(
        &self,
        shapes: &mut Vec<Shape>,
        row: f64,
        spans: &[Span],
        look: impl Fn(&Span) -> (Option<String>, Color),
    ) {
        let y = BOTTOM + row * BAND + 10.0;
        let mut drawn = 0.0;
        for span in spans {
            let (start, end) = (self.x(span.start), self.x(span.end));
            let (name, color) = look(span);
            let width = (end - start).max(0.5);
            // Thousands of spans may fall on one point.
            if end < drawn {
                continue;
            }
            drawn = end.floor().max(start) + 0.5;
            shapes.push(Shape::Rect { x: start, y, width, height: BAND - 4.0, color });
            if width > 3.0 {
                // Across the plot for phases; between segments, which share their phase's colour.
                let (top, color) = if row == 0.0 { (TOP, GRID) } else { (y, [0xff, 0xff, 0xff]) };
                let (from, to) = ((start, top), (start, y + BAND - 4.0));
                shapes.push(Shape::Line { from, to, color, stroke: Stroke::Solid });
            }
            let room = ((width - 6.0) / LETTER).floor();
            if let Some(name) = name.filter(|name| name.chars().count() as f64 <= room) {
                let middle = (start + end) / 2.0;
                shapes.push(text(middle, y + 15.0, Anchor::Middle, Weight::Regular, INK, name));
            }
        }
    }

    fn peak(&self, shapes: &mut Vec<Shape>) {
        let peak = self.timeline.peak();
        let (x, y) = (self.x(peak.time), self.y(peak.bytes as f64));
        let (from, to) = ((x, TOP), (x, BOTTOM));
        shapes.push(Shape::Line { from, to, color: INK, stroke: Stroke::Dashed });
        shapes.push(Shape::Dot { x, y, radius: 4.0, color: INK });
        let place = peak.segment.map(|name| format!(" of {}", cut(&shown(&name), 24))).unwrap_or_default();
        let label = format!("peak {} in {}{place}", amount(peak.bytes), peak.phase.name());
        let half = label.chars().count() as f64 * LETTER / 2.0;
        let middle = x.clamp(LEFT + half, LEFT + PLOT_WIDTH as f64 - half);
        shapes.push(text(middle, TOP - 8.0, Anchor::Middle, Weight::Bold, INK, label));
    }

    fn refusals(&self, shapes: &mut Vec<Shape>) {
        // A few with their text; more would lie on each other.
        for (index, refusal) in self.timeline.refusals.iter().enumerate().take(50) {
            let (x, y) = (self.x(refusal.time), self.y(refusal.live as f64));
            shapes.push(Shape::Dot { x, y, radius: 5.0, color: ALARM });
            if index >= 3 {
                continue;
            }
            let label = format!("out of memory: {} asked for", amount(refusal.bytes));
            let right = x > LEFT + PLOT_WIDTH as f64 / 2.0;
            let (x, anchor) = if right { (x - 9.0, Anchor::End) } else { (x + 9.0, Anchor::Start) };
            let y = y - 6.0 + 16.0 * index as f64;
            shapes.push(text(x, y, anchor, Weight::Bold, ALARM, label));
        }
    }
}

/// The roles from the top down, with what they held at the peak.
fn legend(shapes: &mut Vec<Shape>, timeline: &Timeline) {
    let x = LEFT + PLOT_WIDTH as f64 + 28.0;
    let mut y = TOP + 14.0;
    shapes.push(text(x, y, Anchor::Start, Weight::Bold, INK, "at the peak"));
    let peak = timeline.moments[timeline.peak];
    let highest = timeline.highest();
    for role in STACKED.into_iter().rev().filter(|role| highest[*role] > 0) {
        y += 26.0;
        shapes.push(Shape::Rect { x, y: y - 12.0, width: 14.0, height: 14.0, color: color_of(role) });
        shapes.push(text(x + 22.0, y, Anchor::Start, Weight::Regular, INK, role.name()));
        let bytes = amount(peak.roles[role]);
        shapes.push(text(WIDTH as f64 - 24.0, y, Anchor::End, Weight::Regular, INK, bytes));
    }
    y += 14.0;
    let (from, to) = ((x, y), (WIDTH as f64 - 24.0, y));
    shapes.push(Shape::Line { from, to, color: PALE, stroke: Stroke::Solid });
    shapes.push(text(x + 22.0, y + 20.0, Anchor::Start, Weight::Bold, INK, "together"));
    let total = amount(peak.live);
    shapes.push(text(WIDTH as f64 - 24.0, y + 20.0, Anchor::End, Weight::Bold, INK, total));
    holders(shapes, timeline, x, y + 62.0);
}

/// The largest holders at the peak, as far as there is room.
fn holders(shapes: &mut Vec<Shape>, timeline: &Timeline, x: f64, mut y: f64) {
    shapes.push(text(x, y, Anchor::Start, Weight::Bold, INK, "its largest holders"));
    for holder in timeline.peak().holders.iter().take(6) {
        y += 24.0;
        let color = color_of(holder.role);
        shapes.push(Shape::Rect { x, y: y - 12.0, width: 14.0, height: 14.0, color });
        shapes.push(text(x + 22.0, y, Anchor::Start, Weight::Regular, INK, who(holder)));
        let bytes = amount(holder.bytes);
        shapes.push(text(WIDTH as f64 - 24.0, y, Anchor::End, Weight::Regular, INK, bytes));
    }
}

/// A holder in as many letters as there is room for.
fn who(holder: &Holder) -> String {
    let role = holder.role.name();
    match &holder.segment {
        None => role.to_owned(),
        Some(segment) => cut(&format!("{role}, {}", shown(segment)), 22),
    }
}

/// What the bands' colours mean.
fn phases(shapes: &mut Vec<Shape>, timeline: &Timeline) {
    let mut x = LEFT;
    let y = HEIGHT as f64 - 18.0;
    for phase in Phase::ALL.into_iter().filter(|phase| timeline.spans.iter().any(|span| span.phase == *phase))
    {
        let color = color_of_phase(phase);
        shapes.push(Shape::Rect { x, y: y - 12.0, width: 14.0, height: 14.0, color });
        shapes.push(text(x + 20.0, y, Anchor::Start, Weight::Regular, PALE, phase.name()));
        x += 20.0 + (phase.name().len() as f64 + 3.0) * LETTER;
    }
}

/// Neighbours with one key as one span.
fn merged<K: PartialEq>(spans: &[Span], key: impl Fn(&Span) -> K) -> Vec<Span> {
    let mut merged: Vec<Span> = Vec::new();
    for span in spans {
        match merged.last_mut() {
            Some(last) if key(last) == key(span) => last.end = span.end,
            _ => merged.push(span.clone()),
        }
    }
    merged
}

pub(super) fn text(
    x: f64,
    y: f64,
    anchor: Anchor,
    weight: Weight,
    color: Color,
    text: impl Into<String>,
) -> Shape {
    Shape::Text(Text { x, y, anchor, weight, color, text: text.into() })
}

pub(super) fn unit_of(bytes: f64) -> (f64, &'static str) {
    match bytes {
        _ if bytes >= 1e10 => (1e9, "GB"),
        _ if bytes >= 1e6 => (1e6, "MB"),
        _ if bytes >= 1e3 => (1e3, "kB"),
        _ => (1.0, "B"),
    }
}

/// 1, 2 or 5 times a power of ten, so that about `pieces` of them make `whole`.
pub(super) fn round_step(whole: f64, pieces: f64) -> f64 {
    let rough = (whole / pieces).max(1e-12);
    let power = 10f64.powf(rough.log10().floor());
    let digit = [1.0, 2.0, 5.0, 10.0].into_iter().find(|digit| rough <= digit * power * 1.000_001);
    digit.unwrap_or(10.0) * power
}

/// A number without needless digits.
pub(super) fn short(number: f64) -> String {
    let text = format!("{number:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn milliseconds(time: Duration) -> String {
    match time.as_secs_f64() {
        long if long >= 10.0 => format!("{long:.1} s"),
        short => format!("{:.1} ms", short * 1e3),
    }
}

pub(super) fn cut(name: &str, most: usize) -> String {
    match name.char_indices().nth(most) {
        None => name.to_owned(),
        Some((end, _)) => format!("{}...", &name[..end]),
    }
}
