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
    /// The field with the base where the dictionary gives none.
    pub(crate) theta_field: &'static str,
    /// The field with the share where the dictionary gives none.
    pub(crate) partial_field: &'static str,
    /// How positions beyond the first context may be scaled.
    pub(crate) scalings: Scalings,
}

impl RopeDefaults {
    /// What most families have: heads that are rotated in whole, fields with common names, all scalings.
    pub(crate) const COMMON: Self = Self {
        theta: 10_000.0,
        partial: None,
        theta_field: "rope_theta",
        partial_field: "partial_rotary_factor",
        scalings: Scalings::All,
    };
}

/// The scalings that a family knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scalings {
    /// All of them.
    All,
    /// LongRoPE alone, which old configurations call `su` or `yarn`.
    LongRope {
        /// Tokens of the pre-training context where the configuration gives none beside the dictionary. What the
        /// dictionary says of it counts for nothing, as in transformers.
        original_tokens: u32,
    },
}

/// One scaling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scaling {
    Default,
    Linear,
    Dynamic,
    Llama3,
    Yarn,
    LongRope,
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
        None => config.positive(defaults.theta_field, defaults.theta)?,
    };
    let partial = match defaults.partial {
        None => 1.0,
        Some(default) => match parameters.optional_positive("partial_rotary_factor")? {
            Some(partial) => partial,
            None => config.positive(defaults.partial_field, default)?,
        },
    };
    let head = RotatedHead { features: head_dim, partial };
    with_base(config, &parameters, head, context, theta, defaults.scalings)
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
    scalings: Scalings,
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
    let powers = powers(theta, rotated);
    let mut stretched = context;
    let mut stretch = |tokens: u32, factor: f64| {
        stretched = context.max((f64::from(tokens) * factor) as u32);
    };
    let (frequencies, magnitude) = match scaling(parameters, scalings)? {
        Scaling::Default => (Frequencies::Fixed(inverse(&powers)), 1.0),
        Scaling::Linear => {
            let factor = needed(parameters, "factor")?;
            match config.optional_size("max_sequence_length")? {
                // One beyond the context is the scaled context, one below it the context before scaling.
                Some(longest) if longest > context => stretch(longest, 1.0),
                longest => {
                    let unscaled = longest.unwrap_or(context);
                    stretch(original_tokens(config, parameters, unscaled)?, factor);
                }
            }
            let factor = factor as f32;
            let scaled = inverse(&powers).into_iter().map(|frequency| frequency / factor).collect();
            (Frequencies::Fixed(scaled), 1.0)
        }
        Scaling::Dynamic => {
            ensure!(
                rotated > 2 && rotated == dims,
                config.error(format_args!("dynamic scaling cannot rotate {rotated} elements"))
            );
            let factor = needed(parameters, "factor")?;
            let original_tokens = context;
            stretch(context, factor);
            (Frequencies::Dynamic { base: theta, factor, original_tokens }, 1.0)
        }
        Scaling::Llama3 => (Frequencies::Fixed(llama3(config, parameters, context, &powers)?), 1.0),
        Scaling::Yarn => {
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
        Scaling::LongRope => {
            let original = match scalings {
                Scalings::All => original_tokens(config, parameters, context)?,
                Scalings::LongRope { original_tokens } => {
                    config.size(ORIGINAL_TOKENS, original_tokens)?
                }
            };
            longrope(parameters, context, original, &powers)?
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

/// The scaling that the dictionary names.
fn scaling(parameters: &Config, scalings: Scalings) -> Result<Scaling> {
    let name = if parameters.has("rope_type") { "rope_type" } else { "type" };
    let text = parameters.text(name)?.unwrap_or("default");
    Ok(match scalings {
        Scalings::All => match text {
            "default" => Scaling::Default,
            "linear" => Scaling::Linear,
            "dynamic" => Scaling::Dynamic,
            "llama3" => Scaling::Llama3,
            "yarn" => Scaling::Yarn,
            "longrope" => Scaling::LongRope,
            _ => {
                let known = "one of default, linear, dynamic, llama3, yarn and longrope";
                return Err(parameters.unexpected(name, known));
            }
        },
        Scalings::LongRope { .. } => match text {
            "default" => Scaling::Default,
            "longrope" | "su" | "yarn" => Scaling::LongRope,
            _ => return Err(parameters.unexpected(name, "one of default, longrope, su and yarn")),
        },
    })
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

/// The field with the tokens of the pre-training context.
const ORIGINAL_TOKENS: &str = "original_max_position_embeddings";

/// Tokens of the pre-training context: beside the dictionary, in it, or never stretched.
fn original_tokens(config: &Config, parameters: &Config, context: u32) -> Result<u32> {
    match config.optional_size(ORIGINAL_TOKENS)? {
        Some(tokens) => Ok(tokens),
        None => parameters.size(ORIGINAL_TOKENS, context),
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
    parameters: &Config,
    context: u32,
    original_tokens: u32,
    powers: &[f32],
) -> Result<(Frequencies, f64)> {
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
mod tests;
