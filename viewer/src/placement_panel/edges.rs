//! What passes between cards.

use std::collections::BTreeMap;

use egui::{FontId, Pos2, Rect, Stroke, StrokeKind, Ui, Vec2, pos2, vec2};

use super::{Columns, Row};
use crate::quantity;
use crate::scene::{Kind, Program};
use crate::theme;

/// What passes between rows: one line for each pair of rows and devices, with bytes and number.
pub(super) fn draw_edges(ui: &Ui, program: &Program, rows: &[Row], columns: Columns<'_>) {
    let row_of = |block: usize| rows.iter().position(|row| (row.first..=row.last).contains(&block));
    let mut sums = BTreeMap::<(usize, usize, usize, usize), (u64, usize)>::new();
    for edge in &program.edges {
        let (Some(from), Some(to)) = (row_of(edge.from_block), row_of(edge.to_block)) else {
            continue;
        };
        let sum = sums.entry((from, to, edge.from, edge.to)).or_default();
        sum.0 = sum.0.saturating_add(edge.bytes);
        sum.1 += 1;
    }
    let color = theme::kind(Kind::Transfer);
    let body = columns.body;
    let column = |device: usize| columns.left(device) + columns.width(device) / 2.0;
    let mut labels: Vec<Rect> = Vec::new();
    for ((from, to, sender, receiver), (bytes, count)) in sums {
        let (start, end) = if from == to {
            let lower = if sender < receiver { 8.0 } else { 16.0 };
            let y = body.top() + rows[from].top + rows[from].height + lower;
            (pos2(column(sender), y), pos2(column(receiver), y))
        } else {
            let (upper, lower) = (&rows[from], &rows[to]);
            let start = body.top() + upper.top + if from < to { upper.height } else { 0.0 };
            let end = body.top() + lower.top + if from < to { 0.0 } else { lower.height };
            (pos2(column(sender), start), pos2(column(receiver), end))
        };
        if !ui.is_rect_visible(Rect::from_two_pos(start, end).expand(4.0)) {
            continue;
        }
        let middle = (start.y + end.y) / 2.0;
        let bends = [start, pos2(start.x, middle), pos2(end.x, middle), end];
        ui.painter().line(bends.to_vec(), Stroke::new(2.0, color));
        ui.painter().arrow(
            end - vec2(0.0, if from == to { 0.0 } else { 5.0 }),
            if from == to { vec2((end.x - start.x).signum() * 5.0, 0.0) } else { vec2(0.0, 5.0) },
            Stroke::new(2.0, color),
        );
        let text = if count == 1 {
            quantity::bytes(bytes)
        } else {
            format!("{count} × {}", quantity::bytes(bytes / count as u64))
        };
        let galley =
            ui.painter().layout_no_wrap(text, FontId::proportional(11.5), theme::strong(ui));
        let place = label_place(start, end, galley.size() + vec2(8.0, 2.0));
        let place = free_place(place, &labels, body);
        labels.push(place);
        ui.painter().rect(
            place,
            3.0,
            ui.visuals().panel_fill,
            Stroke::new(1.0, color),
            StrokeKind::Inside,
        );
        ui.painter().galley(place.min + vec2(4.0, 1.0), galley, theme::strong(ui));
    }
}

/// The place of a label at half height, beside the line that goes down to the receiver: other lines lie on the way.
fn label_place(start: Pos2, end: Pos2, size: Vec2) -> Rect {
    /// Between line and label.
    const APART: f32 = 6.0;
    let left = if start.x <= end.x { end.x + APART } else { end.x - APART - size.x };
    Rect::from_min_size(pos2(left, (start.y + end.y - size.y) / 2.0), size)
}

/// A label's place inside the picture: edges of one gap have their labels beside each other, to the right as far as
/// there is room, then to the left.
fn free_place(place: Rect, labels: &[Rect], body: Rect) -> Rect {
    let place = place.translate(vec2((body.right() - place.right()).min(0.0), 0.0));
    let step = place.width() + 4.0;
    let beside = |side: f32| {
        (0..=2 * labels.len()).map(move |n| place.translate(vec2(side * step * n as f32, 0.0)))
    };
    let rightwards = beside(1.0).take_while(|place| place.right() <= body.right());
    let is_free = |place: &Rect| !labels.iter().any(|label| label.intersects(*place));
    rightwards.chain(beside(-1.0)).find(is_free).unwrap_or(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_beside_the_line_of_its_receiver() {
        let place = |start, end| label_place(pos2(start, 10.0), pos2(end, 30.0), vec2(40.0, 16.0));
        let rect = |left| Rect::from_min_size(pos2(left, 12.0), vec2(40.0, 16.0));
        assert_eq!(place(100.0, 300.0), rect(306.0));
        assert_eq!(place(500.0, 300.0), rect(254.0));
        assert_eq!(place(300.0, 300.0), rect(306.0));
    }

    #[test]
    fn labels_stay_in_the_picture_beside_each_other() {
        let body = Rect::from_min_size(pos2(0.0, 0.0), vec2(200.0, 100.0));
        let rect = |left| Rect::from_min_size(pos2(left, 12.0), vec2(40.0, 16.0));
        assert_eq!(free_place(rect(10.0), &[], body), rect(10.0));
        assert_eq!(free_place(rect(180.0), &[], body), rect(160.0));
        assert_eq!(free_place(rect(10.0), &[rect(10.0)], body), rect(54.0));
        assert_eq!(free_place(rect(130.0), &[rect(130.0)], body), rect(86.0));
        assert_eq!(free_place(rect(80.0), &[rect(80.0), rect(124.0)], body), rect(36.0));
    }
}
