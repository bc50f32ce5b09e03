use std::collections::BTreeMap;

use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster};

use super::{Anchor, Color, Scene, Shape, Stroke, Text, Weight};

/// Pixels, three bytes each, from the upper left, row by row.
pub(super) struct Image {
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) pixels: Vec<u8>,
}

/// Draws the scene, one pixel per point.
pub(super) fn draw(scene: &Scene) -> Image {
    let mut image =
        Image { width: scene.width, height: scene.height, pixels: vec![255; scene.width * scene.height * 3] };
    for shape in &scene.shapes {
        image.shape(shape);
    }
    image
}

impl Image {
    /// Lays a colour over a pixel; nothing outside the image.
    fn blend(&mut self, x: i64, y: i64, color: Color, cover: f64) {
        let (Ok(x), Ok(y)) = (usize::try_from(x), usize::try_from(y)) else { return };
        if x >= self.width || y >= self.height {
            return;
        }
        let at = (y * self.width + x) * 3;
        for (pixel, new) in self.pixels[at..at + 3].iter_mut().zip(color) {
            let mixed = f64::from(*pixel) * (1.0 - cover) + f64::from(new) * cover;
            *pixel = mixed.round() as u8;
        }
    }

    fn shape(&mut self, shape: &Shape) {
        match shape {
            Shape::Rect { x, y, width, height, color } => {
                for column in x.round() as i64..(x + width).round() as i64 {
                    self.column(column, *y, y + height, *color);
                }
            }
            Shape::Line { from, to, color, stroke } => self.line(*from, *to, *color, *stroke),
            Shape::Dot { x, y, radius, color } => self.dot(*x, *y, *radius, *color),
            Shape::Area { x, columns, color, .. } => {
                for (index, (top, bottom)) in columns.iter().enumerate() {
                    self.column(x.round() as i64 + index as i64, *top, *bottom, *color);
                }
            }
            Shape::Curve { points, width, color, .. } => self.curve(points, *width, *color),
            Shape::Text(text) => self.text(text),
        }
    }

    /// Fills a column from `top` to `bottom`, partly where they cut a pixel.
    fn column(&mut self, x: i64, top: f64, bottom: f64, color: Color) {
        for y in top.floor() as i64..bottom.ceil() as i64 {
            let cover = (bottom.min(y as f64 + 1.0) - top.max(y as f64)).clamp(0.0, 1.0);
            self.blend(x, y, color, cover);
        }
    }

    fn line(&mut self, from: (f64, f64), to: (f64, f64), color: Color, stroke: Stroke) {
        let length = (to.0 - from.0).abs().max((to.1 - from.1).abs()).round();
        for step in 0..=length as i64 {
            if stroke == Stroke::Dashed && step % 9 > 4 {
                continue;
            }
            let part = if length > 0.0 { step as f64 / length } else { 0.0 };
            let (x, y) = (from.0 + (to.0 - from.0) * part, from.1 + (to.1 - from.1) * part);
            self.blend(x.floor() as i64, y.floor() as i64, color, 1.0);
        }
    }

    /// Each pixel is covered once, however many pieces of the curve touch it.
    fn curve(&mut self, points: &[(f64, f64)], width: f64, color: Color) {
        let mut covers = BTreeMap::new();
        let reach = width / 2.0 + 1.0;
        for ends in points.windows(2) {
            let (from, to) = (ends[0], ends[1]);
            let span = |a: f64, b: f64| (a.min(b) - reach).floor() as i64..=(a.max(b) + reach).ceil() as i64;
            for x in span(from.0, to.0) {
                for y in span(from.1, to.1) {
                    let away = distance((x as f64 + 0.5, y as f64 + 0.5), from, to);
                    let cover = (width / 2.0 + 0.5 - away).clamp(0.0, 1.0);
                    let most: &mut f64 = covers.entry((x, y)).or_insert(0.0);
                    *most = most.max(cover);
                }
            }
        }
        covers.into_iter().for_each(|((x, y), cover)| self.blend(x, y, color, cover));
    }

    fn dot(&mut self, x: f64, y: f64, radius: f64, color: Color) {
        let reach = radius.ceil() as i64 + 1;
        for dx in -reach..=reach {
            for dy in -reach..=reach {
                let (column, row) = (x.floor() as i64 + dx, y.floor() as i64 + dy);
                let away = (column as f64 + 0.5 - x).hypot(row as f64 + 0.5 - y);
                self.blend(column, row, color, (radius + 0.5 - away).clamp(0.0, 1.0));
            }
        }
    }

    fn text(&mut self, text: &Text) {
        let weight = match text.weight {
            Weight::Regular => FontWeight::Regular,
            Weight::Bold => FontWeight::Bold,
        };
        let letters: Vec<_> = text
            .text
            .chars()
            .filter_map(|letter| {
                get_raster(letter, weight, RasterHeight::Size16)
                    .or_else(|| get_raster('?', weight, RasterHeight::Size16))
            })
            .collect();
        let width: usize = letters.iter().map(|letter| letter.width()).sum();
        let shift = match text.anchor {
            Anchor::Start => 0,
            Anchor::Middle => width / 2,
            Anchor::End => width,
        };
        let mut x = text.x.round() as i64 - shift as i64;
        // The base line lies 13 of 16 rows below a letter's top.
        let top = text.y.round() as i64 - 13;
        for letter in letters {
            for (row, line) in letter.rows().enumerate() {
                for (column, cover) in line.iter().enumerate() {
                    self.blend(x + column as i64, top + row as i64, text.color, f64::from(*cover) / 255.0);
                }
            }
            x += letter.width() as i64;
        }
    }
}

/// From a point to the nearest one between two others.
fn distance(point: (f64, f64), from: (f64, f64), to: (f64, f64)) -> f64 {
    let (dx, dy) = (to.0 - from.0, to.1 - from.1);
    let square = dx * dx + dy * dy;
    let along = if square > 0.0 { ((point.0 - from.0) * dx + (point.1 - from.1) * dy) / square } else { 0.0 };
    let along = along.clamp(0.0, 1.0);
    (point.0 - from.0 - along * dx).hypot(point.1 - from.1 - along * dy)
}
