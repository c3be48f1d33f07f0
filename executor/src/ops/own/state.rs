//! What kernels need of a device between runs.

use anyhow::Result;
use ir::id::DeviceId;
use ir::plan::Plan;

use super::caches::Caches;
use super::rotations::Rotations;
use super::weights::Weights;
use crate::home_caches::HomeCaches;
use crate::kernels::cpu::isa::Isa;
use crate::team::Team;

/// One device's weights and caches, as kernels read them.
pub(crate) struct State {
    pub(super) isa: Isa,
    pub(crate) weights: Weights,
    pub(super) caches: Caches,
    pub(super) rotations: Rotations,
}

impl State {
    /// Makes the caches of a device. Weights are added one by one.
    pub(crate) fn new(
        plan: &Plan,
        device: DeviceId,
        isa: Isa,
        team: &Team,
        home_caches: &HomeCaches,
    ) -> Result<Self> {
        Ok(Self {
            isa,
            weights: Weights::default(),
            caches: Caches::new(plan, device, team, home_caches)?,
            rotations: Rotations::default(),
        })
    }
}
