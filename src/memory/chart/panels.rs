//! Runs side by side, on one scale of bytes and one of time.

use super::colors;
use super::layout::{GRID, INK, LETTER, PALE, cut, round_step, short, text, unit_of};
use super::resident::{CURVES, Moment, ResidentChart, Run};
use super::{Anchor, Scene, Shape, Stroke, Weight};
use crate::memory::tables::amount;

const WIDTH: f64 = 1280.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 96.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 116.0;
const BOTTOM: f64 = 460.0;
/// Between two panels.
const GAP: f64 = 36.0;
/// Of a curve.
const THICK: f64 = 2.4;

/// The chart of runs.
pub(super) fn scene(chart: &ResidentChart) -> Scene {
    let mut shapes = vec![text(LEFT, 32.0, Anchor::Start, Weight::Bold, INK, &chart.title)];
    let what = if chart.above_start { "beyond each run's first moment" } else { "of the process" };
    shapes.push(text(LEFT, 54.0, Anchor::Start, Weight::Regular, PALE, format!("resident bytes {what}")));
    let scale = Scale::of(chart);
    let width = panel_width(chart.runs.len().max(1) as f64);
    for (index, run) in chart.runs.iter().enumerate() {
        let panel = Panel { left: LEFT + index as f64 * (width + GAP), width, scale: &scale, run };
        panel.grid(&mut shapes, index == 0);
        panel.budget(&mut shapes, chart.budget, index == 0);
        panel.curves(&mut shapes);
        panel.time_axis(&mut shapes);
        panel.heading(&mut shapes);
    }
    legend(&mut shapes, chart);
    Scene { width: WIDTH as usize, height: HEIGHT as usize, title: chart.title.clone(), shapes }
}

fn panel_width(panels: f64) -> f64 {
    ((WIDTH - LEFT - RIGHT - GAP * (panels - 1.0)) / panels).max(1.0)
}

/// Bytes and seconds to points, for all panels.
struct Scale {
    above_start: bool,
    /// Of the longest run.
    seconds: f64,
    most: f64,
    every: f64,
    unit: (f64, &'static str),
}

impl Scale {
    fn of(chart: &ResidentChart) -> Self {
        let all = chart.runs.iter().flat_map(|run| curves(run, chart.above_start));
        let highest = all.flatten().map(|(_, bytes)| bytes).fold(0.0, f64::max);
        let highest = highest.max(chart.budget.map_or(0.0, |bytes| bytes as f64)).max(1.0);
        let unit = unit_of(highest);
        let every = round_step(highest * 1.08 / unit.0, 6.0) * unit.0;
        let most = (highest * 1.08 / every).ceil() * every;
        let ends = chart.runs.iter().filter_map(|run| run.moments.last());
        let seconds = ends.map(|last| last.time).fold(1e-6, f64::max);
        Self { above_start: chart.above_start, seconds, most, every, unit }
    }

    fn y(&self, bytes: f64) -> f64 {
        BOTTOM - (bytes / self.most).clamp(0.0, 1.0) * (BOTTOM - TOP)
    }
}

/// Each figure of a run over time, as seconds and bytes.
fn curves(run: &Run, above_start: bool) -> [Vec<(f64, f64)>; 3] {
    std::array::from_fn(|index| {
        let told = |moment: &Moment| Some((moment.time, moment.bytes[index]?));
        let mut points: Vec<(f64, f64)> = run.moments.iter().filter_map(told).collect();
        let start = points.first().map_or(0.0, |first| first.1);
        if above_start {
            points.iter_mut().for_each(|(_, bytes)| *bytes = (*bytes - start).max(0.0));
        }
        points
    })
}

struct Panel<'a> {
    left: f64,
    width: f64,
    scale: &'a Scale,
    run: &'a Run,
}

impl Panel<'_> {
    fn x(&self, time: f64) -> f64 {
        self.left + (time / self.scale.seconds).clamp(0.0, 1.0) * self.width
    }

    fn grid(&self, shapes: &mut Vec<Shape>, labelled: bool) {
        let Scale { most, every, unit, .. } = self.scale;
        for line in 0..=(most / every).round() as u32 {
            let bytes = f64::from(line) * every;
            let y = self.scale.y(bytes);
            let (from, to) = ((self.left, y), (self.left + self.width, y));
            shapes.push(Shape::Line { from, to, color: GRID, stroke: Stroke::Solid });
            if labelled {
                let label = format!("{} {}", short(bytes / unit.0), unit.1);
                shapes.push(text(self.left - 8.0, y + 4.0, Anchor::End, Weight::Regular, PALE, label));
            }
        }
    }

    fn budget(&self, shapes: &mut Vec<Shape>, budget: Option<u64>, labelled: bool) {
        let Some(bytes) = budget else { return };
        let y = self.scale.y(bytes as f64);
        let (from, to) = ((self.left, y), (self.left + self.width, y));
        shapes.push(Shape::Line { from, to, color: INK, stroke: Stroke::Dashed });
        if labelled {
            let label = format!("budget {}", amount(bytes));
            shapes.push(text(self.left + 6.0, y - 6.0, Anchor::Start, Weight::Regular, INK, label));
        }
    }

    fn curves(&self, shapes: &mut Vec<Shape>) {
        for (index, curve) in curves(self.run, self.scale.above_start).into_iter().enumerate() {
            let points = curve.into_iter().map(|(time, bytes)| (self.x(time), self.scale.y(bytes)));
            let points = thinned(points);
            let (color, name) = (colors::CURVES[index], CURVES[index]);
            match points[..] {
                [] => {}
                // A curve of one point would not be seen.
                [(x, y)] => shapes.push(Shape::Dot { x, y, radius: 1.5 * THICK, color }),
                _ => shapes.push(Shape::Curve { points, width: THICK, color, name }),
            }
        }
    }

    fn time_axis(&self, shapes: &mut Vec<Shape>) {
        let seconds = self.scale.seconds;
        let (scale, unit) = if seconds < 2.0 { (1e3, "ms") } else { (1.0, "s") };
        let whole = seconds * scale;
        let every = round_step(whole, (self.width / 60.0).max(2.0));
        for tick in 0..=(whole / every).floor() as u32 {
            let at = f64::from(tick) * every;
            let x = self.left + at / whole * self.width;
            let (from, to) = ((x, BOTTOM), (x, BOTTOM + 5.0));
            shapes.push(Shape::Line { from, to, color: PALE, stroke: Stroke::Solid });
            shapes.push(text(x, BOTTOM + 20.0, Anchor::Middle, Weight::Regular, PALE, short(at)));
        }
        let middle = self.left + self.width / 2.0;
        shapes.push(text(
            middle,
            BOTTOM + 42.0,
            Anchor::Middle,
            Weight::Regular,
            PALE,
            format!("time, {unit}"),
        ));
    }

    /// The run's name, and what it held at most.
    fn heading(&self, shapes: &mut Vec<Shape>) {
        let letters = (self.width / LETTER) as usize;
        let name = cut(&self.run.name, letters.saturating_sub(3));
        shapes.push(text(self.left, TOP - 34.0, Anchor::Start, Weight::Bold, INK, name));
        let [_, anonymous, _] = curves(self.run, self.scale.above_start);
        let highest = anonymous.iter().map(|(_, bytes)| *bytes).reduce(f64::max);
        if let Some(highest) = highest {
            let label =
                cut(&format!("anonymous at most {}", amount(highest as u64)), letters.saturating_sub(3));
            shapes.push(text(self.left, TOP - 14.0, Anchor::Start, Weight::Regular, PALE, label));
        }
    }
}

/// The lowest and the highest of the points in each column of the image, as they follow each other.
fn thinned(points: impl Iterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let mut kept: Vec<(f64, f64)> = Vec::new();
    let mut column: Vec<(f64, f64)> = Vec::new();
    let end = |column: &mut Vec<(f64, f64)>, kept: &mut Vec<(f64, f64)>| {
        let low = column.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1));
        let high = column.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1));
        let mut both: Vec<(f64, f64)> =
            low.into_iter().chain(high.filter(|high| Some(*high) != low)).collect();
        both.sort_by(|a, b| a.0.total_cmp(&b.0));
        kept.append(&mut both);
        column.clear();
    };
    for point in points {
        if column.first().is_some_and(|first| first.0.floor() < point.0.floor()) {
            end(&mut column, &mut kept);
        }
        column.push(point);
    }
    end(&mut column, &mut kept);
    kept
}

fn legend(shapes: &mut Vec<Shape>, chart: &ResidentChart) {
    let mut x = LEFT;
    let y = HEIGHT - 20.0;
    // As they lie in the picture, from the front to the back.
    for (name, color) in CURVES.into_iter().zip(colors::CURVES).rev() {
        shapes.push(Shape::Rect { x, y: y - 6.0, width: 22.0, height: 3.0, color });
        shapes.push(text(x + 30.0, y, Anchor::Start, Weight::Regular, INK, name));
        x += 30.0 + (name.len() as f64 + 3.0) * LETTER;
    }
    if chart.budget.is_some() {
        let (from, to) = ((x, y - 5.0), (x + 22.0, y - 5.0));
        shapes.push(Shape::Line { from, to, color: INK, stroke: Stroke::Dashed });
        shapes.push(text(x + 30.0, y, Anchor::Start, Weight::Regular, INK, "budget"));
    }
}
