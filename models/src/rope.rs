//! Rotary embeddings as `modeling_rope_utils` of transformers computes them, worked out while lowering.
//!
//! Frequencies are computed in 32 bits in the order transformers uses, so that long contexts turn by the
//! same angles; what it computes as Python floats is computed in 64 bits here.

use std::f64::consts::PI;

use anyhow::{Result, ensure};
use ir::op::{Frequencies, Pairing, Rope};

use crate::config::Config;

/// What a family says of its rotary embedding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RopeDefaults {
    /// Rotary base where the configuration gives none.
    pub(crate) theta: f64,
    /// Share of each head that is rotated where the configuration gives none; `None` in the families that
    /// always rotate all of it.
    pub(crate) partial: Option<f64>,
}

/// A rotary embedding, and what it was made for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rotary {
    pub(crate) rope: Rope,
    /// The longest sequence in tokens: that of the configuration, or what its positions are stretched to.
    pub(crate) context: u32,
}

/// A head, and how much of it is rotated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RotatedHead {
    /// Elements of the head.
    pub(crate) features: u32,
    /// Share of them that is rotated.
    pub(crate) partial: f64,
}

/// No model comes near; a corrupt configuration must not exhaust memory.
const MAX_HEAD_FEATURES: u32 = 1 << 16;

/// The rotary embedding of the layers of one kind.
///
/// `kind` selects a nested dictionary of `rope_parameters`, where there is one for each kind of layer;
/// `context` is the longest sequence in tokens that the configuration gives.
pub(crate) fn rope(
    config: &Config,
    kind: &str,
    head_dim: u32,
    context: u32,
    defaults: RopeDefaults,
) -> Result<Rotary> {
    let parameters = parameters(config, kind)?;
    let theta = match parameters.optional_positive("rope_theta")? {
        Some(theta) => theta,
        None => match config.optional_positive("rope_theta")? {
            Some(theta) => theta,
            None => config.positive("rotary_emb_base", defaults.theta)?,
        },
    };
    let partial = match defaults.partial {
        None => 1.0,
        Some(default) => match parameters.optional_positive("partial_rotary_factor")? {
            Some(partial) => partial,
            None => match config.optional_positive("partial_rotary_factor")? {
                Some(partial) => partial,
                None => config.positive("rotary_pct", default)?,
            },
        },
    };
    let head = RotatedHead { features: head_dim, partial };
    with_base(config, &parameters, head, context, theta)
}

/// The dictionary with the scaling: `rope_scaling` of transformers 4, `rope_parameters` of 5.
fn parameters(config: &Config, kind: &str) -> Result<Config> {
    for name in ["rope_scaling", "rope_parameters"] {
        if let Some(parameters) = config.section(name)? {
            // Where there is a dictionary for each kind of layer, it is the one for this kind.
            return Ok(parameters.section(kind)?.unwrap_or(parameters));
        }
    }
    Ok(config.empty_section("rope_parameters"))
}

/// The rotary embedding of a known base, scaled as `parameters` says.
pub(crate) fn with_base(
    config: &Config,
    parameters: &Config,
    RotatedHead { features: head_dim, partial }: RotatedHead,
    context: u32,
    theta: f64,
) -> Result<Rotary> {
    ensure!(
        head_dim <= MAX_HEAD_FEATURES,
        config
            .error(format_args!("heads of {head_dim} features are more than {MAX_HEAD_FEATURES}"))
    );
    let rotated = (f64::from(head_dim) * partial) as u32;
    ensure!(
        rotated > 0 && partial <= 1.0 && (rotated < head_dim || head_dim.is_multiple_of(2)),
        config.error(format_args!(
            "{rotated} elements of heads of {head_dim} cannot be rotated in pairs"
        ))
    );
    // An odd number is rounded up to pairs, as transformers does, but stays what exponents are divided by.
    let dims = rotated.next_multiple_of(2);
    let kind = match parameters.text("rope_type")? {
        Some(kind) => kind,
        None => parameters.text("type")?.unwrap_or("default"),
    };
    let powers = powers(theta, rotated);
    let mut stretched = context;
    let mut stretch = |tokens: u32, factor: f64| {
        stretched = context.max((f64::from(tokens) * factor) as u32);
    };
    let (frequencies, magnitude) = match kind {
        "default" => (Frequencies::Fixed(inverse(&powers)), 1.0),
        "linear" => {
            let factor = needed(parameters, "factor")? as f32;
            let scaled = inverse(&powers).into_iter().map(|frequency| frequency / factor).collect();
            (Frequencies::Fixed(scaled), 1.0)
        }
        "dynamic" => {
            ensure!(
                rotated > 2 && rotated == dims,
                config.error(format_args!("dynamic scaling cannot rotate {rotated} elements"))
            );
            let factor = needed(parameters, "factor")?;
            let original_tokens = context;
            stretch(context, factor);
            (Frequencies::Dynamic { base: theta, factor, original_tokens }, 1.0)
        }
        "llama3" => (Frequencies::Fixed(llama3(config, parameters, context, &powers)?), 1.0),
        "yarn" => {
            ensure!(
                rotated == dims,
                config.error(format_args!("yarn scaling cannot rotate {rotated} elements"))
            );
            // Published configurations give the context before it or after it.
            if let Some(factor) = parameters.optional_positive("factor")? {
                stretch(original_tokens(config, parameters, context)?, factor);
            }
            yarn(config, parameters, context, theta, &powers)?
        }
        "longrope" => longrope(config, parameters, context, &powers)?,
        _ => {
            let name = if parameters.has("rope_type") { "rope_type" } else { "type" };
            let known = "one of default, linear, dynamic, llama3, yarn and longrope";
            return Err(parameters.unexpected(name, known));
        }
    };
    let finite = match &frequencies {
        Frequencies::Fixed(fixed) => fixed.iter().all(|frequency| frequency.is_finite()),
        Frequencies::Switched { short, long, .. } => {
            short.iter().chain(long).all(|frequency| frequency.is_finite())
        }
        Frequencies::Dynamic { .. } => true,
    };
    ensure!(
        finite && magnitude.is_finite(),
        config.error("the rotary parameters give frequencies that are not finite")
    );
    let rope = Rope { pairing: Pairing::Halves, dims, magnitude: magnitude as f32, frequencies };
    Ok(Rotary { rope, context: stretched })
}

/// `theta^(2 i / rotated)` for each pair, in 32 bits.
fn powers(theta: f64, rotated: u32) -> Vec<f32> {
    let theta = theta as f32;
    (0..rotated).step_by(2).map(|i| theta.powf(i as f32 / rotated as f32)).collect()
}

fn inverse(powers: &[f32]) -> Vec<f32> {
    powers.iter().map(|power| 1.0 / power).collect()
}

fn needed(parameters: &Config, name: &str) -> Result<f64> {
    parameters.optional_positive(name)?.ok_or_else(|| parameters.missing(name))
}

/// Tokens of the pre-training context: beside the dictionary (Phi3), in it, or never stretched.
fn original_tokens(config: &Config, parameters: &Config, context: u32) -> Result<u32> {
    let name = "original_max_position_embeddings";
    match config.optional_size(name)? {
        Some(tokens) => Ok(tokens),
        None => parameters.size(name, context),
    }
}

fn llama3(config: &Config, parameters: &Config, context: u32, powers: &[f32]) -> Result<Vec<f32>> {
    let factor = needed(parameters, "factor")? as f32;
    let low = needed(parameters, "low_freq_factor")?;
    let high = needed(parameters, "high_freq_factor")?;
    let original = f64::from(original_tokens(config, parameters, context)?);
    let (low_wavelength, high_wavelength) = ((original / low) as f32, (original / high) as f32);
    let scaled = inverse(powers).into_iter().map(|frequency| {
        let wavelength = (2.0 * PI) as f32 / frequency;
        if wavelength > low_wavelength {
            frequency / factor
        } else if wavelength < high_wavelength {
            frequency
        } else {
            let smooth = (original as f32 / wavelength - low as f32) / (high - low) as f32;
            (1.0 - smooth) * frequency / factor + smooth * frequency
        }
    });
    Ok(scaled.collect())
}

fn yarn(
    config: &Config,
    parameters: &Config,
    context: u32,
    theta: f64,
    powers: &[f32],
) -> Result<(Frequencies, f64)> {
    let original = f64::from(original_tokens(config, parameters, context)?);
    let factor = match parameters.optional_positive("factor")? {
        Some(factor) => factor,
        None => f64::from(context) / original,
    };
    let magnitude_at =
        |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
    let magnitude = match parameters.optional_number("attention_factor")? {
        Some(magnitude) => magnitude,
        None => {
            let mscale = parameters.number("mscale", 0.0)?;
            let mscale_all_dim = parameters.number("mscale_all_dim", 0.0)?;
            if mscale != 0.0 && mscale_all_dim != 0.0 {
                magnitude_at(mscale) / magnitude_at(mscale_all_dim)
            } else {
                magnitude_at(1.0)
            }
        }
    };
    // Zero means the default here, as Python's `or` has it.
    let rotations = |name: &str, default: f64| -> Result<f64> {
        Ok(Some(parameters.number(name, default)?).filter(|&turns| turns != 0.0).unwrap_or(default))
    };
    let (fast, slow) = (rotations("beta_fast", 32.0)?, rotations("beta_slow", 1.0)?);
    let dims = 2.0 * powers.len() as f64;
    let dimension_of =
        |turns: f64| dims * (original / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (dimension_of(fast), dimension_of(slow));
    if parameters.flag("truncate", true)? {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dims - 1.0));
    if low == high {
        high += 0.001;
    }
    let scaled = powers.iter().enumerate().map(|(i, &power)| {
        let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        let kept = 1.0 - ramp;
        1.0 / (factor as f32 * power) * (1.0 - kept) + 1.0 / power * kept
    });
    Ok((Frequencies::Fixed(scaled.collect()), magnitude))
}

fn longrope(
    config: &Config,
    parameters: &Config,
    context: u32,
    powers: &[f32],
) -> Result<(Frequencies, f64)> {
    let original_tokens = original_tokens(config, parameters, context)?;
    let original = f64::from(original_tokens);
    let factor = match parameters.optional_positive("factor")? {
        Some(factor) => factor,
        None => f64::from(context) / original,
    };
    let magnitude = match parameters.optional_number("attention_factor")? {
        Some(magnitude) => magnitude,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / original.ln()).sqrt(),
    };
    let scaled = |name: &str| -> Result<Vec<f32>> {
        let factors = parameters.positives(name)?;
        ensure!(
            factors.len() == powers.len(),
            parameters.error(format_args!(
                "{name} has {} factors for {} pairs",
                factors.len(),
                powers.len()
            ))
        );
        Ok(powers
            .iter()
            .zip(factors)
            .map(|(power, factor)| 1.0 / (factor as f32 * power))
            .collect())
    };
    let (short, long) = (scaled("short_factor")?, scaled("long_factor")?);
    Ok((Frequencies::Switched { short, long, original_tokens }, magnitude))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lowers the rotary embedding of a configuration with heads of `head_dim`, made for 512 tokens.
    fn lowered(text: &str, head_dim: u32, partial: Option<f64>) -> Result<Rope> {
        Ok(rotary(text, head_dim, partial)?.rope)
    }

    fn rotary(text: &str, head_dim: u32, partial: Option<f64>) -> Result<Rotary> {
        let config = Config::parse("config.json".into(), text.as_bytes())?;
        let defaults = RopeDefaults { theta: 10_000.0, partial };
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
            r#"{"rotary_pct": 0.25, "rope_scaling": {"type": "linear", "factor": 2.0}}"#,
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

    #[test]
    fn scaling_stretches_the_context() {
        let context = |scaling: &str| {
            let text = format!(r#"{{"rope_scaling": {{{scaling}}}}}"#);
            rotary(&text, 16, None).unwrap().context
        };
        let original = r#""original_max_position_embeddings""#;
        assert_eq!(context(&format!(r#""type": "yarn", "factor": 4.0, {original}: 512"#)), 2048);
        assert_eq!(context(r#""type": "yarn", "factor": 4.0"#), 2048);
        // The configuration gives the stretched one already.
        assert_eq!(context(&format!(r#""type": "yarn", "factor": 8.0, {original}: 64"#)), 512);
        assert_eq!(context(r#""type": "dynamic", "factor": 2.0"#), 1024);
        assert_eq!(context(r#""type": "dynamic", "factor": 0.5"#), 512);
        assert_eq!(context(r#""type": "linear", "factor": 2.0"#), 512);
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
}
