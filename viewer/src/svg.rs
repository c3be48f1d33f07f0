//! A frame's shapes as a drawing that scales.

use std::fmt::Write as _;

use egui::epaint::{ClippedShape, ColorMode, PathShape, PathStroke, RectShape, TextShape};
use egui::{Color32, Mesh, Pos2, Rect, Shape, Stroke};

/// The text of an SVG file of `size` points.
pub fn draw(size: [f32; 2], background: Color32, shapes: &[ClippedShape]) -> String {
    let [width, height] = size;
    let mut svg = Svg { text: String::new() };
    let _ = writeln!(
        svg.text,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"Ubuntu, DejaVu Sans, sans-serif\">"
    );
    let whole = Rect::from_min_max(Pos2::ZERO, Pos2::new(width, height));
    svg.rect(whole, 0.0, background, Stroke::NONE);
    for (number, ClippedShape { clip_rect, shape, .. }) in shapes.iter().enumerate() {
        let clip = clip_rect.intersect(whole);
        if clip.is_negative() {
            continue;
        }
        let clipped = !clip.contains_rect(shape.visual_bounding_rect());
        if clipped {
            let _ = write!(svg.text, "<clipPath id=\"c{number}\">");
            svg.rect(clip, 0.0, Color32::BLACK, Stroke::NONE);
            let _ = writeln!(svg.text, "</clipPath><g clip-path=\"url(#c{number})\">");
        }
        svg.shape(shape);
        if clipped {
            svg.text += "</g>\n";
        }
    }
    svg.text += "</svg>\n";
    svg.text
}

struct Svg {
    text: String,
}

impl Svg {
    fn shape(&mut self, shape: &Shape) {
        match shape {
            Shape::Noop | Shape::Callback(_) => (),
            Shape::Vec(shapes) => shapes.iter().for_each(|shape| self.shape(shape)),
            Shape::Rect(RectShape { rect, corner_radius, fill, stroke, blur_width, .. }) => {
                // Shadows are soft; a drawing does without them.
                if *blur_width == 0.0 {
                    self.rect(*rect, f32::from(corner_radius.nw), *fill, *stroke);
                }
            }
            Shape::Circle(circle) => {
                let _ = writeln!(
                    self.text,
                    "<circle cx=\"{:.2}\" cy=\"{:.2}\" r=\"{:.2}\" {}/>",
                    circle.center.x,
                    circle.center.y,
                    circle.radius,
                    style(circle.fill, circle.stroke.width, circle.stroke.color)
                );
            }
            Shape::Ellipse(ellipse) => {
                let _ = writeln!(
                    self.text,
                    "<ellipse cx=\"{:.2}\" cy=\"{:.2}\" rx=\"{:.2}\" ry=\"{:.2}\" {}/>",
                    ellipse.center.x,
                    ellipse.center.y,
                    ellipse.radius.x,
                    ellipse.radius.y,
                    style(ellipse.fill, ellipse.stroke.width, ellipse.stroke.color)
                );
            }
            Shape::LineSegment { points, stroke } => {
                self.path(points, false, Color32::TRANSPARENT, stroke.width, stroke.color);
            }
            Shape::Path(PathShape { points, closed, fill, stroke }) => {
                self.path(points, *closed, *fill, stroke.width, solid(stroke));
            }
            Shape::QuadraticBezier(curve) => {
                let points = curve.flatten(None);
                self.path(
                    &points,
                    curve.closed,
                    curve.fill,
                    curve.stroke.width,
                    solid(&curve.stroke),
                );
            }
            Shape::CubicBezier(curve) => {
                let points = curve.flatten(None);
                self.path(
                    &points,
                    curve.closed,
                    curve.fill,
                    curve.stroke.width,
                    solid(&curve.stroke),
                );
            }
            Shape::Band(_) => (),
            Shape::Text(text) => self.words(text),
            Shape::Mesh(mesh) => self.mesh(mesh),
        }
    }

    fn rect(&mut self, rect: Rect, radius: f32, fill: Color32, stroke: Stroke) {
        if !rect.is_finite() || (fill.a() == 0 && stroke.is_empty()) {
            return;
        }
        let _ = writeln!(
            self.text,
            "<rect x=\"{:.2}\" y=\"{:.2}\" width=\"{:.2}\" height=\"{:.2}\" rx=\"{radius}\" {}/>",
            rect.left(),
            rect.top(),
            rect.width().max(0.0),
            rect.height().max(0.0),
            style(fill, stroke.width, stroke.color)
        );
    }

    fn path(&mut self, points: &[Pos2], closed: bool, fill: Color32, width: f32, stroke: Color32) {
        let points: Vec<String> =
            points.iter().map(|point| format!("{:.2},{:.2}", point.x, point.y)).collect();
        let name = if closed { "polygon" } else { "polyline" };
        let _ = writeln!(
            self.text,
            "<{name} points=\"{}\" {}/>",
            points.join(" "),
            style(if closed { fill } else { Color32::TRANSPARENT }, width, stroke)
        );
    }

    fn words(&mut self, shape: &TextShape) {
        for row in &shape.galley.rows {
            let text: String = row.row.glyphs.iter().map(|glyph| glyph.chr).collect();
            let Some(first) = row.row.glyphs.first() else { continue };
            if text.trim().is_empty() {
                continue;
            }
            let format = shape.galley.job.sections.first().map(|section| &section.format);
            let size = format.map_or(12.0, |format| format.font_id.size);
            let own = format.map_or(shape.fallback_color, |format| format.color);
            let own = if own == Color32::PLACEHOLDER { shape.fallback_color } else { own };
            let color = shape.override_text_color.unwrap_or(own);
            let length: f32 = row.row.glyphs.iter().map(|glyph| glyph.advance_width).sum();
            let at = shape.pos + row.pos.to_vec2() + first.pos.to_vec2();
            // The length keeps text in its place whatever font the reader has.
            let _ = writeln!(
                self.text,
                "<text x=\"{:.2}\" y=\"{:.2}\" font-size=\"{size}\" textLength=\"{length:.2}\" \
                 lengthAdjust=\"spacingAndGlyphs\" xml:space=\"preserve\" {}>{}</text>",
                at.x,
                at.y,
                style(color, 0.0, Color32::TRANSPARENT),
                escape(&text)
            );
        }
    }

    /// Meshes of rectangles, as the timeline draws; other triangles one by one.
    fn mesh(&mut self, mesh: &Mesh) {
        let mut indices = mesh.indices.as_slice();
        while indices.len() >= 3 {
            let vertex = |at: usize| &mesh.vertices[indices[at] as usize];
            let color = vertex(0).color;
            let quad =
                indices.len() >= 6 && indices[1..3].iter().any(|i| indices[3..6].contains(i));
            if quad {
                let points: Vec<Pos2> = (0..6).map(|at| vertex(at).pos).collect();
                self.rect(Rect::from_points(&points), 0.0, color, Stroke::NONE);
                indices = &indices[6..];
            } else {
                let points: Vec<Pos2> = (0..3).map(|at| vertex(at).pos).collect();
                self.path(&points, true, color, 0.0, Color32::TRANSPARENT);
                indices = &indices[3..];
            }
        }
    }
}

fn solid(stroke: &PathStroke) -> Color32 {
    match stroke.color {
        ColorMode::Solid(color) => color,
        ColorMode::UV(_) => Color32::GRAY,
    }
}

fn style(fill: Color32, width: f32, stroke: Color32) -> String {
    let paint = |name: &str, color: Color32| {
        let [r, g, b, a] = color.to_srgba_unmultiplied();
        match a {
            0 => format!("{name}=\"none\""),
            255 => format!("{name}=\"#{r:02x}{g:02x}{b:02x}\""),
            _ => format!(
                "{name}=\"#{r:02x}{g:02x}{b:02x}\" {name}-opacity=\"{:.3}\"",
                f32::from(a) / 255.0
            ),
        }
    };
    let fill = paint("fill", fill);
    if width > 0.0 && stroke.a() > 0 {
        format!("{fill} {} stroke-width=\"{width}\"", paint("stroke", stroke))
    } else {
        fill
    }
}

fn escape(text: &str) -> String {
    // Other control characters have no place in XML.
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.chars().filter(|c| !c.is_control()).collect()
}
