//! What passes between cards.

use std::collections::BTreeMap;

use egui::{FontId, Rect, Stroke, StrokeKind, Ui, pos2, vec2};

use super::{Columns, Row};
use crate::quantity;
use crate::scene::{Kind, Program};
use crate::theme;

/// What passes between rows: one line for each pair of rows and devices, with bytes and number.
pub(super) fn draw_edges(ui: &Ui, program: &Program, rows: &[Row], columns: Columns) {
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
    let column = |device: usize| columns.left(device) + columns.width / 2.0;
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
        let mut place = Rect::from_center_size(
            pos2((start.x + end.x) / 2.0, middle),
            galley.size() + vec2(8.0, 2.0),
        );
        // Edges of one gap have their labels beside each other.
        while labels.iter().any(|label| label.intersects(place)) {
            place = place.translate(vec2(place.width() + 4.0, 0.0));
        }
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
