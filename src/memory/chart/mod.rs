//! Charts as shapes that SVG and PNG both draw: the stacked areas of a timeline, and the curves of
//! resident memory.

mod colors;
mod layout;
mod panels;
mod png;
mod raster;
mod resident;
mod svg;

pub(super) use colors::{STACKED, color_of, color_of_phase};
pub use resident::ResidentChart;

use super::phase::Phase;
use super::timeline::Timeline;
use crate::error::Result;

impl Timeline {
    /// What charts and pages are headed.
    pub(super) fn title(&self) -> String {
        let busy = self.spans.iter().filter(|span| span.phase != Phase::Idle);
        let steps: Vec<u32> = busy.map(|span| span.step).collect();
        match (steps.iter().min(), steps.iter().max()) {
            (Some(first), Some(last)) if first == last => format!("Memory over training step {first}"),
            (Some(first), Some(last)) => format!("Memory over training steps {first} to {last}"),
            _ => "Memory over time".to_owned(),
        }
    }

    /// The chart as an SVG image: live bytes by role over time, phases below, the peak marked.
    pub fn svg(&self) -> String {
        svg::write(&layout::scene(self))
    }

    /// The chart as a PNG image of 1280 × 720 points.
    ///
    /// # Errors
    /// None that a timeline of this crate meets.
    pub fn png(&self) -> Result<Vec<u8>> {
        png::encode(&raster::draw(&layout::scene(self)))
    }
}

/// Red, green, blue.
type Color = [u8; 3];

/// Where a text's position lies in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Anchor {
    Start,
    Middle,
    End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weight {
    Regular,
    Bold,
}

#[derive(Clone, Debug)]
struct Text {
    x: f64,
    /// The base line.
    y: f64,
    anchor: Anchor,
    weight: Weight,
    color: Color,
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stroke {
    Solid,
    Dashed,
}

#[derive(Clone, Debug)]
enum Shape {
    Rect {
        x: f64,
        y: f64,
        width: f64,
        height: f64,
        color: Color,
    },
    /// Upright or level.
    Line {
        from: (f64, f64),
        to: (f64, f64),
        color: Color,
        stroke: Stroke,
    },
    Dot {
        x: f64,
        y: f64,
        radius: f64,
        color: Color,
    },
    /// One column per point from `x` on, each from its top to its bottom.
    Area {
        x: f64,
        columns: Vec<(f64, f64)>,
        color: Color,
        name: &'static str,
    },
    /// From point to point, to the right.
    Curve {
        points: Vec<(f64, f64)>,
        width: f64,
        color: Color,
        name: &'static str,
    },
    Text(Text),
}

/// Shapes from the back to the front, in points from the upper left.
#[derive(Clone, Debug)]
struct Scene {
    width: usize,
    height: usize,
    title: String,
    shapes: Vec<Shape>,
}
