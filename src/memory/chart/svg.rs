use std::fmt::Write;

use super::{Anchor, Color, Scene, Shape, Stroke, Text, Weight};
use crate::memory::export::escape::xml;

/// The scene as a document of its own.
pub(super) fn write(scene: &Scene) -> String {
    let mut out = String::new();
    let (width, height) = (scene.width, scene.height);
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" role=\"img\" font-family=\"ui-monospace, 'DejaVu Sans Mono', Menlo, \
         Consolas, monospace\" font-size=\"13\">\n<title>{}</title>\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>",
        xml(&scene.title)
    );
    for shape in &scene.shapes {
        let _ = writeln!(out, "{}", element(shape));
    }
    out.push_str("</svg>\n");
    out
}

fn element(shape: &Shape) -> String {
    match shape {
        Shape::Rect { x, y, width, height, color } => format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{}\"/>",
            hex(*color)
        ),
        Shape::Line { from, to, color, stroke } => format!(
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{}\"{}/>",
            from.0,
            from.1,
            to.0,
            to.1,
            hex(*color),
            if *stroke == Stroke::Dashed { " stroke-dasharray=\"5 4\"" } else { "" }
        ),
        Shape::Dot { x, y, radius, color } => {
            format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius:.1}\" fill=\"{}\"/>", hex(*color))
        }
        Shape::Area { x, columns, color, name } => format!(
            "<path d=\"{}\" fill=\"{}\"><title>{}</title></path>",
            outline(*x, columns),
            hex(*color),
            xml(name)
        ),
        Shape::Curve { points, width, color, name } => format!(
            "<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{width:.1}\" \
             stroke-linejoin=\"round\"><title>{}</title></path>",
            course(points),
            hex(*color),
            xml(name)
        ),
        Shape::Text(text) => text_element(text),
    }
}

fn text_element(text: &Text) -> String {
    let anchor = match text.anchor {
        Anchor::Start => "start",
        Anchor::Middle => "middle",
        Anchor::End => "end",
    };
    let weight = if text.weight == Weight::Bold { " font-weight=\"bold\"" } else { "" };
    format!(
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\"{weight} fill=\"{}\" xml:space=\"preserve\">{}</text>",
        text.x,
        text.y,
        hex(text.color),
        xml(&text.text)
    )
}

/// Along the tops to the right and along the bottoms back, one corner per change.
fn outline(x: f64, columns: &[(f64, f64)]) -> String {
    let (Some(first), Some(last)) = (columns.first(), columns.last()) else { return String::new() };
    let mut path = format!("M{x:.0} {:.1}", first.0);
    let differ = |a: f64, b: f64| (a - b).abs() >= 0.05;
    for (index, pair) in columns.windows(2).enumerate().filter(|(_, pair)| differ(pair[0].0, pair[1].0)) {
        let _ = write!(path, "H{:.0}V{:.1}", x + index as f64 + 1.0, pair[1].0);
    }
    let _ = write!(path, "H{:.0}V{:.1}", x + columns.len() as f64, last.1);
    for (index, pair) in columns.windows(2).enumerate().rev().filter(|(_, pair)| differ(pair[0].1, pair[1].1))
    {
        let _ = write!(path, "H{:.0}V{:.1}", x + index as f64 + 1.0, pair[0].1);
    }
    let _ = write!(path, "H{x:.0}Z");
    path
}

fn course(points: &[(f64, f64)]) -> String {
    let mut path = String::new();
    for (index, (x, y)) in points.iter().enumerate() {
        let _ = write!(path, "{}{x:.1} {y:.1}", if index == 0 { "M" } else { "L" });
    }
    path
}

fn hex([red, green, blue]: Color) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}
