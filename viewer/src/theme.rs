//! Colors that mean something, for dark and light.

use egui::{Color32, Context, FontDefinitions, FontFamily, TextStyle, Theme, Ui, lerp};

use crate::scene::{Device, IdleCause, Kind, Scene, Step};

/// Text that is easy to read, and a glyph for every character that this program writes.
pub fn install(context: &Context) {
    let mut fonts = FontDefinitions::default();
    // The proportional font has no arrows; the monospaced one does.
    if let Some(names) = fonts.families.get_mut(&FontFamily::Proportional) {
        names.push("Hack".to_owned());
    }
    context.set_fonts(fonts);
    for (theme, text) in [(Theme::Dark, 205), (Theme::Light, 40)] {
        context.style_mut_of(theme, |style| {
            style.visuals.widgets.noninteractive.fg_stroke.color = Color32::from_gray(text);
            if let Some(font) = style.text_styles.get_mut(&TextStyle::Small) {
                font.size = 11.5;
            }
        });
    }
}

/// What the color of a block or span says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Coloring {
    /// Where it runs.
    Device,
    /// What sort of work it is.
    Kind,
    /// How long it is predicted to take, against the longest.
    Time,
    /// How far the prediction is off.
    Error,
}

impl Coloring {
    /// All of them, in the order of the menu.
    pub const ALL: [Coloring; 4] =
        [Coloring::Device, Coloring::Kind, Coloring::Time, Coloring::Error];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Coloring::Device => "device",
            Coloring::Kind => "kind of work",
            Coloring::Time => "predicted time",
            Coloring::Error => "error of the prediction",
        }
    }
}

// Okabe and Ito's palette, told apart by most people; GPUs take warm, NUMA nodes cool hues.
const WARM: [Color32; 5] = [
    Color32::from_rgb(230, 159, 0),
    Color32::from_rgb(213, 94, 0),
    Color32::from_rgb(240, 228, 66),
    Color32::from_rgb(250, 140, 120),
    Color32::from_rgb(190, 110, 60),
];
const COOL: [Color32; 5] = [
    Color32::from_rgb(86, 180, 233),
    Color32::from_rgb(0, 158, 115),
    Color32::from_rgb(90, 130, 230),
    Color32::from_rgb(120, 200, 170),
    Color32::from_rgb(60, 150, 200),
];

/// The color of a device, the same everywhere.
pub fn device(scene: &Scene, device: usize) -> Color32 {
    device_among(&scene.devices, device)
}

/// The color of one of some devices: its own among those of its kind.
pub fn device_among(devices: &[Device], device: usize) -> Color32 {
    let Some(row) = devices.get(device) else { return Color32::GRAY };
    let alike = devices[..device].iter().filter(|other| other.is_gpu == row.is_gpu).count();
    let palette = if row.is_gpu { WARM } else { COOL };
    // Each round of the palette is paler than the one before.
    let round = (alike / palette.len()) as f32;
    mix(palette[alike % palette.len()], Color32::WHITE, (0.45 * round).min(0.75))
}

/// The color of a sort of work.
pub fn kind(kind: Kind) -> Color32 {
    match kind {
        Kind::Embed => Color32::from_rgb(160, 160, 110),
        Kind::Norm => Color32::from_rgb(150, 150, 160),
        Kind::Linear => Color32::from_rgb(86, 160, 220),
        Kind::Attention => Color32::from_rgb(0, 158, 115),
        Kind::Experts => Color32::from_rgb(225, 150, 60),
        Kind::Elementwise => Color32::from_rgb(130, 120, 150),
        Kind::Transfer => Color32::from_rgb(225, 105, 170),
        Kind::Collective => Color32::from_rgb(155, 100, 225),
    }
}

/// From pale to strong, for a part of the largest.
pub fn heat(part: f32) -> Color32 {
    mix(Color32::from_rgb(70, 90, 120), Color32::from_rgb(240, 120, 40), part)
}

/// Blue where it was faster than predicted, red where slower; grey within a few percent; unknown is dark.
pub fn error(error: Option<f64>) -> Color32 {
    let Some(error) = error else { return Color32::from_gray(90) };
    let middle = Color32::from_gray(165);
    // A factor of one and a half is as bad as it gets.
    let size = (error.abs() as f32 / 0.5).min(1.0);
    let end =
        if error < 0.0 { Color32::from_rgb(50, 110, 220) } else { Color32::from_rgb(215, 50, 40) };
    mix(middle, end, size)
}

/// Why a queue stands still.
pub fn idle(cause: IdleCause) -> Color32 {
    match cause {
        IdleCause::Transfer(_) => kind(Kind::Transfer),
        IdleCause::Collective(_) => kind(Kind::Collective),
        IdleCause::Dependency(_) => Color32::from_rgb(105, 125, 155),
        IdleCause::NoWork => Color32::from_gray(95),
    }
}

/// The color of a step.
pub fn step(scene: &Scene, row: &Step, coloring: Coloring, longest: u64) -> Color32 {
    match coloring {
        Coloring::Device if row.kind.is_move() => kind(row.kind),
        Coloring::Device => device(scene, row.device),
        Coloring::Kind => kind(row.kind),
        Coloring::Time => heat(row.predicted_nanos as f32 / longest.max(1) as f32),
        Coloring::Error => error(row.error()),
    }
}

/// Between two colors.
pub fn mix(from: Color32, to: Color32, part: f32) -> Color32 {
    let part = part.clamp(0.0, 1.0);
    let channel = |from: u8, to: u8| lerp(f32::from(from)..=f32::from(to), part) as u8;
    Color32::from_rgb(
        channel(from.r(), to.r()),
        channel(from.g(), to.g()),
        channel(from.b(), to.b()),
    )
}

/// A color as a background that text stays readable on.
pub fn tint(ui: &Ui, color: Color32, strength: f32) -> Color32 {
    mix(ui.visuals().panel_fill, color, strength)
}

/// Text that is read first.
pub fn strong(ui: &Ui) -> Color32 {
    ui.visuals().strong_text_color()
}

/// Text that is read last.
pub fn weak(ui: &Ui) -> Color32 {
    mix(ui.visuals().text_color(), ui.visuals().panel_fill, 0.25)
}

/// What is wrong, or the bottleneck.
pub fn alarm(ui: &Ui) -> Color32 {
    if ui.visuals().dark_mode {
        Color32::from_rgb(255, 110, 90)
    } else {
        Color32::from_rgb(190, 30, 20)
    }
}

/// How a time changed, relative to what it was: less is better; a thousandth, or what is not known, is no change.
pub fn change(ui: &Ui, change: Option<f64>) -> Color32 {
    match change {
        Some(change) if change < -0.001 => good(ui),
        Some(change) if change > 0.001 => alarm(ui),
        Some(_) | None => ui.visuals().text_color(),
    }
}

/// What is better than it was.
pub fn good(ui: &Ui) -> Color32 {
    if ui.visuals().dark_mode {
        Color32::from_rgb(110, 220, 130)
    } else {
        Color32::from_rgb(0, 120, 50)
    }
}
