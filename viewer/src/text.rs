//! One line of text where there is little room.

use egui::{Color32, FontId, Pos2, Ui, vec2};

/// One line of small text, cut at `width`.
pub fn text_within(
    ui: &Ui,
    painter: &egui::Painter,
    left_center: Pos2,
    width: f32,
    text: &str,
    color: Color32,
) {
    if width < 14.0 {
        return;
    }
    let mut job = egui::text::LayoutJob::simple_singleline(
        text.to_owned(),
        FontId::proportional(11.0),
        color,
    );
    job.wrap = egui::text::TextWrapping::truncate_at_width(width);
    let galley = ui.fonts_mut(|fonts| fonts.layout_job(job));
    painter.galley(left_center - vec2(0.0, galley.size().y / 2.0), galley, color);
}
