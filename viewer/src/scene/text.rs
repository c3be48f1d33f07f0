//! The text form of a scene: what its tests compare.

use std::fmt;

use super::{Idle, IdleCause, Program, Scene, Timing};
use crate::quantity::{bytes, nanos, share};

impl fmt::Display for Scene {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.title, self.subtitle)?;
        for finding in &self.findings {
            writeln!(f, "finding: {finding}")?;
        }
        for device in &self.devices {
            writeln!(
                f,
                "device {}: weights {}, cache {}, buffers {}{} of {}",
                device.name,
                bytes(device.weight_bytes),
                bytes(device.cache_bytes),
                bytes(device.buffer_bytes),
                [("fetched", device.fetch_bytes), ("scratch", device.scratch_bytes)]
                    .into_iter()
                    .filter(|(_, part)| *part > 0)
                    .map(|(name, part)| format!(", {name} {}", bytes(part)))
                    .collect::<String>(),
                bytes(device.capacity_bytes)
            )?;
        }
        for (number, program) in self.programs.iter().enumerate() {
            writeln!(f, "program {}", program.name)?;
            for line in self.headline(number) {
                writeln!(f, "  {line}")?;
            }
            self.write_groups(f, number)?;
            self.write_timing(f, program, &program.predicted, "predicted")?;
            if let Some(run) = self.typical_run(number)
                && let Some(timing) = self.run_timing(run)
            {
                self.write_timing(f, program, &timing, &format!("run {run}"))?;
            }
            for (device, curve) in self.devices.iter().zip(&program.memory) {
                writeln!(f, "  buffers of {}: peak {}", device.name, bytes(curve.peak()))?;
            }
        }
        for lane in &self.lanes {
            writeln!(f, "lane {}: {} measured spans", lane.name, lane.measured.rows().len())?;
        }
        Ok(())
    }
}

impl Scene {
    fn write_groups(&self, f: &mut fmt::Formatter<'_>, number: usize) -> fmt::Result {
        let program = &self.programs[number];
        for group in &program.groups {
            let first = &program.blocks[group.first];
            let last = &program.blocks[group.last];
            let devices: Vec<String> =
                first.devices.iter().map(|&device| self.device_name(device)).collect();
            let title = match (first.number, last.number) {
                (Some(from), Some(to)) if from < to => format!("layers {from}–{to}, alike"),
                _ => first.title(),
            };
            let home = self.home_text(number, &first.steps);
            let home = if home.is_empty() { home } else { format!(", {home}") };
            write!(
                f,
                "  {title} on {}{home}: {} each, predicted {}",
                devices.join(" + "),
                bytes(first.weight_bytes),
                nanos(first.predicted_nanos as f64)
            )?;
            if let Some(measured) = first.measured_nanos {
                write!(f, ", measured {}", nanos(measured as f64))?;
            }
            for (verb, moved, count) in &first.collectives {
                write!(f, ", {count} × {verb} of {}", bytes(*moved))?;
            }
            writeln!(f, "; {}", first.cause)?;
        }
        for edge in &program.edges {
            writeln!(
                f,
                "  {} → {}: {} from {} to {}",
                program.blocks[edge.from_block].title(),
                program.blocks[edge.to_block].title(),
                bytes(edge.bytes),
                self.device_name(edge.from),
                self.device_name(edge.to)
            )?;
        }
        Ok(())
    }

    fn write_timing(
        &self,
        f: &mut fmt::Formatter<'_>,
        program: &Program,
        timing: &Timing,
        title: &str,
    ) -> fmt::Result {
        let whole = timing.nanos().max(1) as f64;
        writeln!(f, "  {title}: {}, {} steps critical", nanos(whole), timing.critical.len())?;
        for (queue, (lane, _)) in program.queues.iter().enumerate() {
            write!(f, "    {}: {}", self.lanes[*lane].name, timing.work_text(queue))?;
            let mut causes =
                [("transfer", 0), ("collective", 0), ("dependency", 0), ("no work", 0)];
            for Idle { start, end, cause, .. } in timing.idle.iter().filter(|i| i.queue == queue) {
                let place = match cause {
                    IdleCause::Transfer(_) => 0,
                    IdleCause::Collective(_) => 1,
                    IdleCause::Dependency(_) => 2,
                    IdleCause::NoWork => 3,
                };
                causes[place].1 += end - start;
            }
            for (name, time) in causes.into_iter().filter(|&(_, time)| time > 0) {
                write!(f, ", {name} {}", share(time as f64 / whole))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
