//! Devices that share layers, and how an axis is divided between them.

use ir::id::{DeviceId, Few};
use ir::smallvec;
use ir::workspace::WARPGROUP_COLUMNS;

/// Distinct devices with the share of the work that each should get.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Group {
    /// The first one leads: it does what cannot be shared.
    pub(crate) devices: Few<DeviceId>,
    /// Positive, in any scale.
    pub(crate) shares: Vec<f64>,
}

/// Granularities of a divided axis that parts of [`LEAST_GRAINS`] grains or more have: whole tiles, and what columns are a
/// multiple of for the matrix instructions of Hopper GPUs. (On an H200 40 rows with a down projection in 4-bit take 50 µs
/// with 7,200 or 7,136 columns, 13 with 7,168.)
const COARSE_GRAINS: [u32; 2] = [2 * WARPGROUP_COLUMNS, WARPGROUP_COLUMNS];
/// Half a grain is 3 % of as many.
const LEAST_GRAINS: f64 = 16.0;
/// Granularities that any part may have: whole blocks of the block formats, then whole vector registers.
const FEATURE_GRAINS: [u32; 4] = [32, 16, 8, 1];

impl Group {
    /// One device.
    pub(crate) fn one(device: DeviceId) -> Self {
        Self { devices: smallvec![device], shares: vec![1.0] }
    }

    /// [`parts()`] by the group's shares.
    pub(crate) fn parts(&self, total: u32, grain: u32) -> Option<Few<u32>> {
        parts(&self.shares, total, grain)
    }

    /// Divides features in the coarsest grain that they and the shares allow: of the two coarse ones by what gives nobody
    /// more than the other does.
    pub(crate) fn feature_parts(&self, total: u32) -> Option<Few<u32>> {
        let least = self.shares.iter().fold(f64::INFINITY, |least, &share| least.min(share));
        let least = least / self.shares.iter().sum::<f64>() * f64::from(total);
        let is_fine = |grain: &u32| least / f64::from(*grain) >= LEAST_GRAINS;
        let slowest = |parts: &Few<u32>| {
            let loads =
                parts.iter().zip(&self.shares).map(|(&part, share)| f64::from(part) / share);
            loads.fold(0.0, f64::max)
        };
        let coarse = COARSE_GRAINS.into_iter().filter(is_fine);
        let coarse = coarse.filter_map(|grain| self.parts(total, grain));
        let best = coarse.min_by(|a, b| slowest(a).total_cmp(&slowest(b)));
        best.or_else(|| FEATURE_GRAINS.into_iter().find_map(|grain| self.parts(total, grain)))
    }
}

/// Divides `total` in whole multiples of `grain`, at least one for each share, in proportion to the shares.
///
/// `None` when `total` is no multiple of `grain` or has too few of them.
pub(crate) fn parts(shares: &[f64], total: u32, grain: u32) -> Option<Few<u32>> {
    let grains = total / grain;
    if !total.is_multiple_of(grain) || (grains as usize) < shares.len() {
        return None;
    }
    let sum: f64 = shares.iter().sum();
    // Everyone gets one grain; the rest goes by largest remainder.
    let wanted: Vec<f64> = shares.iter().map(|share| share / sum * f64::from(grains)).collect();
    let mut parts: Few<u32> = wanted.iter().map(|&want| (want.floor() as u32).max(1)).collect();
    loop {
        let given: u32 = parts.iter().sum();
        let shortfall = |member: usize| wanted[member] - f64::from(parts[member]);
        let by_shortfall = |a: &usize, b: &usize| shortfall(*a).total_cmp(&shortfall(*b));
        if given < grains {
            // Of equals the first: `max_by` alone would take the last.
            let most = (0..parts.len()).rev().max_by(by_shortfall).expect("there are shares");
            parts[most] += 1;
        } else if given > grains {
            let least = (0..parts.len())
                .filter(|&member| parts[member] > 1)
                .min_by(by_shortfall)
                .expect("there are at least as many grains as shares");
            parts[least] -= 1;
        } else {
            return Some(parts.iter().map(|part| part * grain).collect());
        }
    }
}

/// Divides 1 in proportion to `weights`, with no more for each than its part of `most`: what one has no room for goes to
/// the others. `None` where all together have none.
pub(crate) fn filled(weights: &[f64], most: &[f64]) -> Option<Vec<f64>> {
    let mut is_full = vec![false; weights.len()];
    loop {
        let of = |parts: &[f64], full: bool| -> f64 {
            let parts = parts.iter().zip(&is_full).filter(|(_, is_full)| **is_full == full);
            parts.map(|(part, _)| part).sum()
        };
        let (left, others) = (1.0 - of(most, true), of(weights, false));
        if left <= 0.0 || others == 0.0 {
            return None;
        }
        let part = |member: usize| match is_full[member] {
            true => most[member],
            false => weights[member] / others * left,
        };
        let parts: Vec<f64> = (0..weights.len()).map(part).collect();
        let overfull = |member: &usize| parts[*member] > most[*member];
        let overfull: Vec<usize> = (0..parts.len()).filter(overfull).collect();
        if overfull.is_empty() {
            return Some(parts);
        }
        // They get no more as others are filled.
        overfull.into_iter().for_each(|member| is_full[member] = true);
    }
}

#[cfg(test)]
mod tests {
    use ir::id::Id as _;

    use super::*;

    fn check(shares: &[f64], total: u32, grain: u32, expected: Option<&[u32]>) {
        assert_eq!(parts(shares, total, grain).as_deref(), expected);
    }

    #[test]
    fn parts_follow_shares_in_whole_grains() {
        check(&[3.0, 1.0], 128, 32, Some(&[96, 32]));
        check(&[1.0, 1.0], 96, 32, Some(&[64, 32]));
        check(&[1.0, 1.0, 1.0], 7, 1, Some(&[3, 2, 2]));
    }

    #[test]
    fn features_are_divided_in_tiles_where_parts_have_many() {
        let parts = |shares: [f64; 2], total: u32| {
            let devices = [0, 1].map(DeviceId::from_index).into_iter().collect();
            Group { devices, shares: shares.to_vec() }
                .feature_parts(total)
                .expect("they are enough")
        };
        // GPUs that differ by less than a grain get as much.
        assert_eq!(parts([1.0, 0.995], 14336)[..], [7168, 7168]);
        assert_eq!(parts([3.0, 1.0], 14336)[..], [10752, 3584]);
        // Whole halves of tiles rather than one tile more for one.
        assert_eq!(parts([1.0, 1.0], 5504)[..], [2752, 2752]);
        // 16 grains of 64 of the smaller part, and fewer.
        assert_eq!(parts([9.0, 1.0], 14336)[..], [12928, 1408]);
        assert_eq!(parts([30.0, 1.0], 14336)[..], [13888, 448]);
        // No multiple of 128, and one of 32 alone.
        assert_eq!(parts([1.0, 1.0], 4928)[..], [2496, 2432]);
        assert_eq!(parts([1.0, 1.0], 4896)[..], [2464, 2432]);
    }

    #[test]
    fn what_one_has_no_room_for_goes_to_the_others() {
        assert_eq!(filled(&[3.0, 1.0], &[1.0, 1.0]).unwrap(), [0.75, 0.25]);
        assert_eq!(filled(&[3.0, 1.0], &[0.5, 1.0]).unwrap(), [0.5, 0.5]);
        // The second is filled by what the first leaves.
        assert_eq!(filled(&[4.0, 3.0, 1.0], &[0.25, 0.5, 1.0]).unwrap(), [0.25, 0.5, 0.25]);
        assert_eq!(filled(&[1.0, 1.0], &[0.25, 0.5]), None);
    }

    #[test]
    fn every_device_gets_a_grain() {
        check(&[1000.0, 1.0, 1.0], 4, 1, Some(&[2, 1, 1]));
        check(&[1.0, 1.0, 1.0], 2, 1, None);
        check(&[1.0, 1.0], 33, 32, None);
    }
}
