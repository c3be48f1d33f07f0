//! Text where there is little room.

use egui::{Color32, FontId, Pos2, Rect, Sense, TextStyle, Ui, pos2, vec2};

/// One line of small text, cut at `width`.
pub fn text_within(
    ui: &Ui,
    painter: &egui::Painter,
    left_center: Pos2,
    width: f32,
    text: &str,
    color: Color32,
) {
    // Less room shows a letter or two, which say nothing.
    if width < 22.0 {
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

/// The first of some texts that is no wider than `width`, else the last.
pub fn fitting<const N: usize>(ui: &Ui, texts: [String; N], size: f32, width: f32) -> String {
    let mut texts = texts.into_iter().peekable();
    while let Some(text) = texts.next() {
        if texts.peek().is_none() || text_width(ui, &text, size) <= width {
            return text;
        }
    }
    String::new()
}

/// How wide a line of text is.
pub fn text_width(ui: &Ui, text: &str, size: f32) -> f32 {
    let font = FontId::proportional(size);
    ui.painter().layout_no_wrap(text.to_owned(), font, Color32::WHITE).size().x
}

/// A patch of color and its meaning, which stay together where lines wrap.
pub fn legend_entry(ui: &mut Ui, color: Color32, meaning: &str) {
    const PATCH: f32 = 12.0;
    const GAP: f32 = 6.0;
    let font = TextStyle::Small.resolve(ui.style());
    let text_color = ui.visuals().text_color();
    let galley = ui.painter().layout_no_wrap(meaning.to_owned(), font, text_color);
    let size = vec2(PATCH + GAP + galley.size().x, galley.size().y.max(PATCH));
    let (rect, _) = ui.allocate_exact_size(size, Sense::hover());
    let patch = pos2(rect.left(), rect.center().y - PATCH / 2.0);
    ui.painter().rect_filled(Rect::from_min_size(patch, vec2(PATCH, PATCH)), 2.0, color);
    let text = pos2(patch.x + PATCH + GAP, rect.center().y - galley.size().y / 2.0);
    ui.painter().galley(text, galley, text_color);
}
