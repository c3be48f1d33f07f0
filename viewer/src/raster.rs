//! Triangles to pixels without a window, a display server or a GPU: pictures for scripts.

use std::collections::HashMap;

use egui::epaint::{ClippedPrimitive, ImageData, Mesh, Primitive, Vertex, textures::TexturesDelta};
use egui::{Color32, ColorImage, Pos2, Rect, TextureId};

/// Textures by id, as egui sends them.
#[derive(Default)]
pub struct Textures(HashMap<TextureId, ColorImage>);

impl Textures {
    /// Applies what a frame adds.
    pub fn apply(&mut self, delta: &TexturesDelta) {
        // Textures do not depend on each other, so their order does not matter.
        #[expect(clippy::iter_over_hash_type, reason = "each texture is set by itself")]
        for (id, images) in &delta.set {
            for image in images {
                let ImageData::Color(pixels) = &image.image;
                match (image.pos, self.0.get_mut(id)) {
                    (Some(at), Some(texture)) => patch(texture, pixels, at),
                    _ => drop(self.0.insert(*id, (**pixels).clone())),
                }
            }
        }
    }
}

fn patch(texture: &mut ColorImage, pixels: &ColorImage, [left, top]: [usize; 2]) {
    let [width, height] = pixels.size;
    for row in 0..height {
        let from = row * width;
        let to = (top + row) * texture.size[0] + left;
        texture.pixels[to..to + width].copy_from_slice(&pixels.pixels[from..from + width]);
    }
}

/// Draws primitives over `background`; `scale` is pixels per point.
pub fn draw(
    size: [usize; 2],
    scale: f32,
    background: Color32,
    primitives: &[ClippedPrimitive],
    textures: &Textures,
) -> ColorImage {
    let mut image = ColorImage::filled(size, background);
    for ClippedPrimitive { clip_rect, primitive } in primitives {
        let Primitive::Mesh(mesh) = primitive else { continue };
        let Some(texture) = textures.0.get(&mesh.texture_id) else { continue };
        let clip = Rect::from_min_max(
            (clip_rect.min.to_vec2() * scale).round().to_pos2(),
            (clip_rect.max.to_vec2() * scale).round().to_pos2(),
        );
        let clip = clip
            .intersect(Rect::from_min_max(Pos2::ZERO, Pos2::new(size[0] as f32, size[1] as f32)));
        draw_mesh(&mut image, mesh, scale, clip, texture);
    }
    image
}

fn draw_mesh(image: &mut ColorImage, mesh: &Mesh, scale: f32, clip: Rect, texture: &ColorImage) {
    for corners in mesh.indices.chunks_exact(3) {
        let corner = |i: usize| {
            let mut vertex = mesh.vertices[corners[i] as usize];
            vertex.pos = (vertex.pos.to_vec2() * scale).to_pos2();
            vertex
        };
        let (a, mut b, mut c) = (corner(0), corner(1), corner(2));
        let area = cross(a.pos, b.pos, c.pos);
        if area == 0.0 || !area.is_finite() {
            continue;
        }
        if area < 0.0 {
            std::mem::swap(&mut b, &mut c);
        }
        draw_triangle(image, [a, b, c], area.abs(), clip, texture);
    }
}

/// Twice the area of a triangle, positive where it turns clockwise on the screen.
fn cross(a: Pos2, b: Pos2, c: Pos2) -> f32 {
    (b.x - a.x) * (c.y - a.y) - (b.y - a.y) * (c.x - a.x)
}

fn draw_triangle(
    image: &mut ColorImage,
    [a, b, c]: [Vertex; 3],
    area: f32,
    clip: Rect,
    texture: &ColorImage,
) {
    let bounds = Rect::from_points(&[a.pos, b.pos, c.pos]).intersect(clip);
    if bounds.is_negative() {
        return;
    }
    let flat = (a.uv == b.uv && b.uv == c.uv).then(|| sample(texture, a.uv));
    // A pixel on the edge of two triangles belongs to one: that of which it is a top or left edge.
    let owns = |from: Pos2, to: Pos2| to.y < from.y || (to.y == from.y && to.x > from.x);
    let owned = [owns(b.pos, c.pos), owns(c.pos, a.pos), owns(a.pos, b.pos)];
    for y in bounds.top() as usize..bounds.bottom().ceil() as usize {
        for x in bounds.left() as usize..bounds.right().ceil() as usize {
            let at = Pos2::new(x as f32 + 0.5, y as f32 + 0.5);
            let weights =
                [cross(b.pos, c.pos, at), cross(c.pos, a.pos, at), cross(a.pos, b.pos, at)];
            let inside = weights
                .iter()
                .zip(owned)
                .all(|(&weight, owned)| weight > 0.0 || (weight == 0.0 && owned));
            if !inside || !clip.contains(at) {
                continue;
            }
            let [u, v, w] = weights.map(|weight| weight / area);
            let texel = flat.unwrap_or_else(|| {
                let uv = a.uv.to_vec2() * u + b.uv.to_vec2() * v + c.uv.to_vec2() * w;
                sample(texture, uv.to_pos2())
            });
            let place = &mut image.pixels[y * image.size[0] + x];
            let mut source = [0.0; 4];
            for channel in 0..4 {
                let part = |vertex: &Vertex| f32::from(vertex.color.to_array()[channel]);
                let tint = part(&a) * u + part(&b) * v + part(&c) * w;
                source[channel] = tint * texel[channel] / 255.0;
            }
            *place = over(source, *place);
        }
    }
}

/// A premultiplied color over another.
fn over(source: [f32; 4], below: Color32) -> Color32 {
    let rest = 1.0 - source[3] / 255.0;
    let below = below.to_array();
    let mix = |channel: usize| (source[channel] + f32::from(below[channel]) * rest).round() as u8;
    Color32::from_rgba_premultiplied(mix(0), mix(1), mix(2), mix(3))
}

/// The texture's color at a point of the unit square, between its four nearest pixels.
fn sample(texture: &ColorImage, uv: Pos2) -> [f32; 4] {
    let [width, height] = texture.size;
    let x = (uv.x * width as f32 - 0.5).max(0.0);
    let y = (uv.y * height as f32 - 0.5).max(0.0);
    let (left, top) = ((x as usize).min(width - 1), (y as usize).min(height - 1));
    let (right, bottom) = ((left + 1).min(width - 1), (top + 1).min(height - 1));
    let (across, down) = (x - left as f32, y - top as f32);
    let pixel = |x: usize, y: usize| texture.pixels[y * width + x].to_array().map(f32::from);
    let (nw, ne, sw, se) =
        (pixel(left, top), pixel(right, top), pixel(left, bottom), pixel(right, bottom));
    std::array::from_fn(|channel| {
        let above = nw[channel] * (1.0 - across) + ne[channel] * across;
        let below = sw[channel] * (1.0 - across) + se[channel] * across;
        above * (1.0 - down) + below * down
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quad(color: Color32) -> ClippedPrimitive {
        let mut mesh = Mesh::default();
        mesh.add_colored_rect(Rect::from_min_max(Pos2::new(2.0, 2.0), Pos2::new(6.0, 6.0)), color);
        let clip_rect = Rect::from_min_max(Pos2::ZERO, Pos2::new(5.0, 8.0));
        ClippedPrimitive { clip_rect, primitive: Primitive::Mesh(mesh) }
    }

    #[test]
    fn a_translucent_rectangle_is_blended_once_a_pixel_and_clipped() {
        let mut textures = Textures::default();
        textures.0.insert(TextureId::default(), ColorImage::filled([1, 1], Color32::WHITE));
        let half = Color32::from_rgba_premultiplied(0, 0, 0, 128);
        let image = draw([8, 8], 1.0, Color32::WHITE, &[quad(half)], &textures);
        let dark: Vec<usize> = (0..64).filter(|&at| image.pixels[at] != Color32::WHITE).collect();
        assert_eq!(dark.len(), 3 * 4, "the fourth column is clipped away");
        // The diagonal that both triangles share is not darker than the rest.
        assert!(dark.iter().all(|&at| image.pixels[at].r() == 127));
    }
}
