//! Rotary embeddings beside what transformers computes, and what is refused.

use super::*;

/// Lowers the rotary embedding of a configuration with heads of `head_dim`, made for 512 tokens.
fn lowered(text: &str, head_dim: u32, partial: Option<f64>) -> Result<Rope> {
    Ok(rotary(text, head_dim, partial)?.rope)
}

fn rotary(text: &str, head_dim: u32, partial: Option<f64>) -> Result<Rotary> {
    made(text, head_dim, RopeDefaults { partial, ..RopeDefaults::COMMON })
}

fn made(text: &str, head_dim: u32, defaults: RopeDefaults) -> Result<Rotary> {
    let config = Config::parse("config.json".into(), text.as_bytes())?;
    rope(&config, "full_attention", head_dim, 512, defaults)
}

/// Compares with what the functions of transformers 5.23 return, run on 32-bit NumPy arrays.
fn check(text: &str, head_dim: u32, partial: Option<f64>, expected: &[f64], magnitude: f64) {
    let rope = lowered(text, head_dim, partial).unwrap();
    let close = |a: f32, b: f64| (f64::from(a) - b).abs() <= 3e-7 * b;
    let found = rope.frequencies.at(rope.dims, 1);
    assert_eq!(found.len(), expected.len());
    assert!(found.iter().zip(expected).all(|(&a, &b)| close(a, b)), "{found:?}");
    assert!(close(rope.magnitude, magnitude), "{}", rope.magnitude);
    assert_eq!(rope.dims as usize, 2 * expected.len());
}

#[test]
fn yarn_ramps_between_the_two_scales() {
    check(
        r#"{"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 64}}"#,
        16,
        None,
        &[
            1.0,
            0.237_170_82,
            0.049_999_997,
            0.007_905_694_7,
            0.002_5,
            0.000_790_569_47,
            0.000_25,
            7.905_694_7e-5,
        ],
        1.138_629_4,
    );
}

#[test]
fn yarn_takes_its_magnitude_from_two_scales() {
    check(
        r#"{"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 64}}"#,
        16,
        None,
        &[
            1.0,
            0.213_453_73,
            0.034_999_996,
            0.000_790_569_47,
            0.000_25,
            7.905_694_7e-5,
            2.5e-5,
            7.905_694_5e-6,
        ],
        1.085_726_4,
    );
}

#[test]
fn yarn_can_be_bounded_otherwise() {
    check(
        r#"{"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000, "factor": 4.0,
            "truncate": false, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5,
            "original_max_position_embeddings": 64}}"#,
        16,
        None,
        &[
            1.0,
            0.148_490_25,
            0.025,
            0.007_905_694_7,
            0.002_5,
            0.000_790_569_47,
            0.000_25,
            7.905_694_7e-5,
        ],
        1.5,
    );
}

#[test]
fn yarn_without_factor_stretches_to_the_context() {
    check(
        r#"{"original_max_position_embeddings": 64,
            "rope_scaling": {"rope_type": "yarn", "factor": null}}"#,
        16,
        None,
        &[
            1.0,
            0.223_994_66,
            0.041_666_664,
            0.003_952_847_3,
            0.001_25,
            0.000_395_284_73,
            0.000_125,
            3.952_847_3e-5,
        ],
        1.207_944_2,
    );
}

#[test]
fn llama3_keeps_high_frequencies() {
    check(
        r#"{"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128}}"#,
        16,
        None,
        &[
            1.0,
            0.191_126_5,
            0.004_700_753_8,
            0.000_911_583_13,
            0.000_176_776_68,
            3.428_102_4e-5,
            6.647_870_6e-6,
            1.289_173_2e-6,
        ],
        1.0,
    );
}

#[test]
fn an_odd_part_of_a_head_is_rounded_up_to_pairs() {
    check(
        r#"{"partial_rotary_factor": 0.25, "rope_scaling": {"type": "linear", "factor": 2.0}}"#,
        20,
        Some(1.0),
        &[0.5, 0.012_559_432, 0.000_315_478_65],
        1.0,
    );
}

const LONGROPE: &str = r#"{"original_max_position_embeddings": 64, "rope_scaling":
    {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1, 2, 3, 4]}}"#;

#[test]
fn longrope_grows_with_the_ratio_of_contexts() {
    let short = [1.0, 0.090_909_094, 0.008_333_333, 0.000_769_230_77];
    check(LONGROPE, 8, None, &short, 1.224_744_9);
    let text = LONGROPE.replace("\"type\"", "\"factor\": 32.0, \"type\"");
    check(&text, 8, None, &short, 1.354_006_4);
}

#[test]
fn longrope_switches_beyond_the_first_context() {
    let rope = lowered(LONGROPE, 8, None).unwrap();
    let second = |length| rope.frequencies.at(rope.dims, length)[1];
    assert_eq!(second(64), second(1));
    assert!((second(65) - 0.05).abs() < 1e-8);
}

/// A family of LongRoPE alone, as Phi3 is, with a first context of 64 tokens where the configuration gives none.
const LONGROPE_ALONE: RopeDefaults =
    RopeDefaults { scalings: Scalings::LongRope { original_tokens: 64 }, ..RopeDefaults::COMMON };

#[test]
fn a_family_of_longrope_alone_knows_it_by_old_names() {
    let expected = rotary(LONGROPE, 8, None).unwrap();
    for name in ["longrope", "su", "yarn"] {
        let text = LONGROPE.replace("longrope", name);
        assert_eq!(made(&text, 8, LONGROPE_ALONE).unwrap(), expected, "{name}");
        let text = text.replace("\"type\"", "\"rope_type\"");
        assert_eq!(made(&text, 8, LONGROPE_ALONE).unwrap(), expected, "{name}");
    }
    assert!(made("{}", 8, LONGROPE_ALONE).is_ok());
    for name in ["linear", "dynamic", "llama3", "spiral"] {
        let text = LONGROPE.replace("longrope", name);
        assert_eq!(
            made(&text, 8, LONGROPE_ALONE).unwrap_err().to_string(),
            format!(
                "config.json: rope_scaling.type is \"{name}\", not one of default, longrope, su and yarn"
            )
        );
    }
}

#[test]
fn a_family_of_longrope_alone_has_its_first_context_beside_the_dictionary() {
    let expected = rotary(LONGROPE, 8, None).unwrap();
    let original = r#""original_max_position_embeddings": "#;
    let without = LONGROPE.replacen(&format!("{original}64, "), "", 1);
    assert_eq!(made(&without, 8, LONGROPE_ALONE).unwrap(), expected);
    // What the dictionary says counts for other families only.
    let inside = without.replace("\"type\"", &format!("{original}32, \"type\""));
    assert_eq!(made(&inside, 8, LONGROPE_ALONE).unwrap(), expected);
    assert_ne!(rotary(&inside, 8, None).unwrap(), expected);
}

#[test]
fn scaling_stretches_the_context() {
    let context_of = |text: &str| rotary(text, 16, None).unwrap().context;
    let context = |scaling: &str| context_of(&format!(r#"{{"rope_scaling": {{{scaling}}}}}"#));
    let original = r#""original_max_position_embeddings""#;
    assert_eq!(context(&format!(r#""type": "yarn", "factor": 4.0, {original}: 512"#)), 2048);
    assert_eq!(context(r#""type": "yarn", "factor": 4.0"#), 2048);
    // The configuration gives the stretched one already.
    assert_eq!(context(&format!(r#""type": "yarn", "factor": 8.0, {original}: 64"#)), 512);
    assert_eq!(context(r#""type": "dynamic", "factor": 2.0"#), 1024);
    assert_eq!(context(r#""type": "dynamic", "factor": 0.5"#), 512);
    assert_eq!(context(r#""type": "linear", "factor": 2.0"#), 1024);
    assert_eq!(context(&format!(r#""type": "linear", "factor": 2.0, {original}: 256"#)), 512);
    let longest = |tokens: u32| {
        let scaling = r#""rope_scaling": {"type": "linear", "factor": 2.0}"#;
        context_of(&format!(r#"{{"max_sequence_length": {tokens}, {scaling}}}"#))
    };
    assert_eq!([256, 512, 1024, 2048].map(longest), [512, 1024, 1024, 2048]);
}

#[test]
fn layers_of_one_kind_may_have_their_own_dictionary() {
    let text = r#"{"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}"#;
    check(text, 4, None, &[0.25, 0.002_5], 1.0);
}

#[test]
fn impossible_parameters_are_refused() {
    let refused =
        |text: &str, head_dim: u32| lowered(text, head_dim, Some(1.0)).unwrap_err().to_string();
    assert_eq!(refused(LONGROPE, 16), "config.json: short_factor has 4 factors for 8 pairs");
    assert_eq!(
        refused("{}", 15),
        "config.json: 15 elements of heads of 15 cannot be rotated in pairs"
    );
    assert_eq!(
        refused(r#"{"rope_theta": -1}"#, 16),
        "config.json: rope_theta is -1, not a number above 0"
    );
    assert_eq!(
        refused(r#"{"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}}"#, 16),
        "config.json: the rotary parameters give frequencies that are not finite"
    );
}
