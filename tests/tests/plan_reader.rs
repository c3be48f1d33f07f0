//! No text makes the plan reader or the checker panic or hang: plans with random damage, 10⁵ of them.

use std::cell::Cell;
use std::ops::Range;
use std::sync::LazyLock;

use compiler::options::parse_tensor_parallel;
use compiler::{Options, compile};
use ir::check::check;
use ir::plan::Plan;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::TestRunner;
use tests::machines;
use tests::toys::{FeedForward, Toy};

/// Damaged texts of each kind.
const CASES: u32 = 50_000;

/// A small plan with every kind of row, as text.
static TEXT: LazyLock<String> = LazyLock::new(|| {
    let feed_forward = FeedForward::Mixture { experts: 4, used: 2, is_shared: false };
    let toy = Toy { layers: 1, feed_forward, ..Toy::llama() };
    let request = parse_tensor_parallel("numa0:3,numa1:1").expect("it is a request");
    let options = Options { request, ..Options::default() };
    let model = toy.model().expect("the toy is a model");
    let mut plan =
        compile(&model, &machines::two_numa(), &options, &mut |_, _| ()).expect("the toy fits");
    // Rates are the larger half of the text, and the checker does not read them.
    for device in plan.machine.devices.rows_mut() {
        device.rates.linear.clear();
    }
    plan.to_ron().expect("a plan can be written")
});

/// One damage to a text.
#[derive(Clone, Debug)]
enum Damage {
    /// The number there becomes another.
    Number(Index, &'static str),
    /// Some bytes go.
    Cut(Index, usize),
    /// Some bytes come twice.
    Double(Index, usize),
    /// A byte becomes another.
    Byte(Index, char),
}

fn damaged_number() -> impl Strategy<Value = Damage> {
    let numbers = vec![
        "0",
        "1",
        "2",
        "7",
        "31",
        "63",
        "255",
        "65536",
        "4294967295",
        "4294967296",
        "18446744073709551615",
        "-1",
        "1e39",
        "NaN",
        "inf",
    ];
    (any::<Index>(), select(numbers)).prop_map(|(at, number)| Damage::Number(at, number))
}

fn damaged_text() -> impl Strategy<Value = Damage> {
    let chars: Vec<char> = "()[]{},:\"0a-.\\ \n".chars().collect();
    prop_oneof![
        (any::<Index>(), 1usize..200).prop_map(|(at, size)| Damage::Cut(at, size)),
        (any::<Index>(), 1usize..200).prop_map(|(at, size)| Damage::Double(at, size)),
        (any::<Index>(), select(chars)).prop_map(|(at, byte)| Damage::Byte(at, byte)),
    ]
}

fn damaged(text: &str, damages: &[Damage]) -> String {
    // The text is ASCII, so bytes are characters.
    let mut text = text.to_owned();
    for damage in damages {
        if text.is_empty() {
            break;
        }
        let range = |at: &Index, size: usize| -> Range<usize> {
            let start = at.index(text.len());
            start..(start + size).min(text.len())
        };
        match damage {
            Damage::Number(at, number) => {
                if let Some(range) = number_at(&text, at.index(text.len())) {
                    text.replace_range(range, number);
                }
            }
            Damage::Cut(at, size) => text.replace_range(range(at, *size), ""),
            Damage::Double(at, size) => {
                let range = range(at, *size);
                let twice = text[range.clone()].repeat(2);
                text.replace_range(range, &twice);
            }
            Damage::Byte(at, byte) => text.replace_range(range(at, 1), &byte.to_string()),
        }
    }
    text
}

/// The next whole number at or after a place.
fn number_at(text: &str, at: usize) -> Option<Range<usize>> {
    let is_digit = |byte: &u8| byte.is_ascii_digit();
    let bytes = text.as_bytes();
    let start = at + bytes[at..].iter().position(is_digit)?;
    let size = bytes[start..].iter().position(|byte| !is_digit(byte))?;
    Some(start..start + size)
}

#[test]
fn the_undamaged_plan_is_sound() {
    assert_eq!(check(&Plan::from_ron(&TEXT).expect("it is a plan")), []);
}

#[test]
fn plans_with_wrong_numbers_are_refused_or_checked() {
    // Four of ten can be read, as numbers of their type.
    let read = read_and_check(damaged_number());
    assert!(read > CASES / 4, "{read} of {CASES} come before the checker");
}

#[test]
fn plans_with_wrong_text_are_refused_or_checked() {
    // One of thirty can be read, mostly with another name.
    let read = read_and_check(damaged_text());
    assert!(read > CASES / 100, "{read} of {CASES} come before the checker");
}

/// Reads many texts with a few damages each, and checks the plans that some of them still are: how many.
fn read_and_check(damage: impl Strategy<Value = Damage>) -> u32 {
    let config =
        ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() };
    let read = Cell::new(0);
    let outcome = TestRunner::new(config).run(&vec(damage, 1..4), |damages| {
        if let Ok(plan) = Plan::from_ron(&damaged(&TEXT, &damages)) {
            read.set(read.get() + 1);
            for violation in check(&plan) {
                prop_assert!(!violation.to_string().is_empty());
            }
        }
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    read.get()
}
