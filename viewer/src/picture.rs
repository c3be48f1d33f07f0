//! The window drawn without a window: PNG and SVG files.

use std::path::Path;

use anyhow::{Context as _, Result};
use egui::{ColorImage, Context, FullOutput, Memory, RawInput, Rect, Ui, Vec2};

use crate::raster::{self, Textures};
use crate::svg;
use crate::theme;

/// Frames until sizes have settled: scroll areas and windows learn theirs one frame late.
const FRAMES: usize = 4;

/// How a picture is taken.
#[derive(Clone, Copy, Debug)]
pub struct Shot {
    /// Width and height in points.
    pub size: [f32; 2],
    /// Pixels per point.
    pub scale: f32,
    /// Light on dark, or dark on light.
    pub dark: bool,
}

/// Draws to pixels.
pub fn pixels(shot: Shot, memory: Option<Memory>, draw: impl FnMut(&mut Ui)) -> ColorImage {
    let (context, output, textures) = frames(shot, memory, draw);
    let primitives = context.tessellate(output.shapes, output.pixels_per_point);
    let size = shot.size.map(|size| (size * shot.scale) as usize);
    let background = context.global_style().visuals.panel_fill;
    raster::draw(size, shot.scale, background, &primitives, &textures)
}

/// Draws to the text of an SVG file.
pub fn vectors(shot: Shot, memory: Option<Memory>, draw: impl FnMut(&mut Ui)) -> String {
    let (context, output, _) = frames(shot, memory, draw);
    svg::draw(shot.size, context.global_style().visuals.panel_fill, &output.shapes)
}

fn frames(
    shot: Shot,
    memory: Option<Memory>,
    mut draw: impl FnMut(&mut Ui),
) -> (Context, FullOutput, Textures) {
    let context = Context::default();
    theme::install(&context);
    if let Some(memory) = memory {
        context.memory_mut(|place| *place = memory);
    }
    context.set_theme(if shot.dark { egui::Theme::Dark } else { egui::Theme::Light });
    context.set_zoom_factor(1.0);
    let mut textures = Textures::default();
    let mut last = None;
    for frame in 0..FRAMES {
        let mut input = RawInput {
            screen_rect: Some(Rect::from_min_size(Default::default(), Vec2::from(shot.size))),
            time: Some(frame as f64 * 0.5),
            ..RawInput::default()
        };
        let viewport = input.viewports.entry(input.viewport_id).or_default();
        viewport.native_pixels_per_point = Some(shot.scale);
        let output = context.run_ui(input, &mut draw);
        textures.apply(&output.textures_delta);
        last = Some(output);
    }
    (context, last.expect("there is at least one frame"), textures)
}

/// Writes pixels as a PNG file.
pub fn save_png(path: &Path, image: &ColorImage) -> Result<()> {
    let writing = || format!("writing {}", path.display());
    let mut file = Vec::new();
    let [width, height] = image.size.map(|size| size as u32);
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_compression(png::Compression::High);
    let pixels: Vec<u8> =
        image.pixels.iter().flat_map(|pixel| [pixel.r(), pixel.g(), pixel.b()]).collect();
    let mut writer = encoder.write_header().with_context(writing)?;
    writer.write_image_data(&pixels).with_context(writing)?;
    writer.finish().with_context(writing)?;
    command_line::write(path, &file)
}
