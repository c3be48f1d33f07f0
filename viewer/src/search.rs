//! Finding a layer, step or device by part of its name.

use egui::{Key, Ui};

use crate::scene::Scene;
use crate::view::{Selection, View};

/// One thing that is asked for.
enum Wanted {
    /// `layer 12`, `block 12`.
    Layer(u32),
    /// `s12`.
    Step(usize),
    /// Part of a text. Digits are a whole number: `2` is no part of `12`.
    Part(String),
}

/// Something that can be found.
struct Place {
    text: String,
    layer: Option<u32>,
    step: Option<usize>,
}

/// Found things, best first: devices, then blocks, then steps that are all that `text` asks for.
pub fn find(scene: &Scene, view: &View, text: &str, most: usize) -> Vec<(String, Selection)> {
    let wanted = wanted(text);
    let Some(program) = view.program(scene).filter(|_| !wanted.is_empty()) else {
        return Vec::new();
    };
    let devices = scene.devices.iter().enumerate().map(|(number, device)| {
        let text = format!("device {}", device.name);
        (Place { text, layer: None, step: None }, Selection::Device(number))
    });
    let blocks = program.blocks.iter().enumerate().map(|(number, block)| {
        let text = format!("{} ({})", block.title(), block.name);
        (Place { text, layer: block.number, step: None }, Selection::Blocks(number, number))
    });
    let steps = program.steps.iter().map(|step| {
        let device = scene.device_name(step.device);
        let text = format!("s{} {} {} on {device}", step.number, step.name, step.verb);
        let layer = program.blocks.get(step.block).and_then(|block| block.number);
        (Place { text, layer, step: Some(step.number) }, Selection::Step(step.number, view.run))
    });
    let all = devices.chain(blocks).chain(steps);
    let found = all.filter(|(place, _)| wanted.iter().all(|wanted| is_at(wanted, place)));
    found.map(|(place, selection)| (place.text, selection)).take(most).collect()
}

fn wanted(text: &str) -> Vec<Wanted> {
    let text = text.to_lowercase();
    let mut words = text.split_whitespace().peekable();
    let mut wanted = Vec::new();
    while let Some(word) = words.next() {
        let number = words.peek().filter(|_| matches!(word, "layer" | "block"));
        if let Some(number) = number.and_then(|number| number.parse().ok()) {
            words.next();
            wanted.push(Wanted::Layer(number));
        } else if let Some(step) = word.strip_prefix('s').and_then(|step| step.parse().ok()) {
            wanted.push(Wanted::Step(step));
        } else {
            wanted.push(Wanted::Part(word.to_owned()));
        }
    }
    wanted
}

fn is_at(wanted: &Wanted, place: &Place) -> bool {
    match wanted {
        Wanted::Layer(number) => place.layer == Some(*number),
        Wanted::Step(number) => place.step == Some(*number),
        Wanted::Part(word) => has_word(&place.text.to_lowercase(), word),
    }
}

/// Whether the text has the word in it. A number at one of its ends is a whole number there; one that is all of the
/// word stands by itself.
fn has_word(text: &str, word: &str) -> bool {
    let is_number = word.chars().all(|c| c.is_ascii_digit());
    let goes_on = |c: char| c.is_ascii_digit() || (is_number && c.is_alphanumeric());
    let is_digit = |c: Option<char>| c.is_some_and(|c| c.is_ascii_digit());
    text.match_indices(word).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + word.len()..]);
        let begins = !is_digit(word.chars().next()) || !before.ends_with(goes_on);
        let ends = !is_digit(word.chars().next_back()) || !after.starts_with(goes_on);
        begins && ends
    })
}

/// Draws the box while it is open.
pub fn show(ui: &mut Ui, scene: &Scene, view: &mut View) {
    let Some(mut text) = view.search.take() else { return };
    let mut chosen = None;
    let mut open = true;
    egui::Window::new("Search")
        .anchor(egui::Align2::CENTER_TOP, [0.0, 60.0])
        .collapsible(false)
        .resizable(false)
        .open(&mut open)
        .show(ui.ctx(), |ui| {
            let hint = "layer, operation or device; Enter takes the first";
            let edit = egui::TextEdit::singleline(&mut text).desired_width(420.0).hint_text(hint);
            let edit = ui.add(edit).accessible_name("what to find");
            let entered = edit.lost_focus() && ui.input(|input| input.key_pressed(Key::Enter));
            edit.request_focus();
            for (number, (title, selection)) in find(scene, view, &text, 12).into_iter().enumerate()
            {
                if ui.selectable_label(number == 0, title).clicked() || (entered && number == 0) {
                    chosen = Some(selection);
                }
            }
        });
    if let Some(selection) = chosen {
        view.selection = selection;
        view.scroll_to_selection = true;
        if let Selection::Step(step, _) = selection {
            view.keep_in_sight(scene, step);
        }
        if let Selection::Blocks(block, _) = selection {
            view.unfold(scene, block);
        }
    } else if open {
        view.search = Some(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_found(asked: &str, text: &str, layer: u32, number: usize) -> bool {
        let place = Place { text: text.to_owned(), layer: Some(layer), step: Some(number) };
        wanted(asked).iter().all(|wanted| is_at(wanted, &place))
    }

    #[test]
    fn numbers_are_found_as_a_whole() {
        let check = |asked: &str, is_there: bool| {
            let text = "s12 model.layers.2.mlp.down_proj linear on gpu0";
            assert_eq!(is_found(asked, text, 2, 12), is_there, "{asked}");
        };
        for asked in ["layer 2", "block 2 DOWN", "s12", "2", "layers.2", "gpu0", "lin gpu"] {
            check(asked, true);
        }
        for asked in ["layer 12", "block 1", "layer 2 up", "s1", "s2", "12", "1", "gpu1"] {
            check(asked, false);
        }
    }
}
