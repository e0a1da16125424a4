//! Memory of a host: what its ranks need together, and what it has.

use std::collections::BTreeMap;

use eaglet_runtime::ids::Role;
use serde::Serialize;

use super::{MemoryPart, Use};
use crate::preflight::machine::Machine;
use crate::preflight::units::size;

/// The coordinator of a run, without its samples: tokenizer, journal, connections.
const COORDINATOR_BYTES: u64 = 96 << 20;
/// What the coordinator remembers of a sample.
const COORDINATOR_SAMPLE_BYTES: u64 = 400;

/// Memory of the coordinator of a run with so many samples.
pub(crate) fn coordinator_bytes(samples: u64) -> u64 {
    COORDINATOR_BYTES + samples * COORDINATOR_SAMPLE_BYTES
}

/// A rank as far as its host is concerned.
#[derive(Clone, Debug)]
pub(crate) struct Tenant {
    /// What it does.
    pub(crate) role: Role,
    /// Its memory.
    pub(crate) parts: Vec<MemoryPart>,
    /// What it maps; tenants with the same share those pages.
    pub(crate) mapping: Option<(u16, u16)>,
}

/// Memory of a host, needed and there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostMemory {
    /// The host.
    pub host: String,
    /// What its processes need for themselves.
    pub private_bytes: u64,
    /// Files that they map, each part once.
    pub mapped_bytes: u64,
    /// Memory of the host.
    pub memory_bytes: u64,
    /// Memory that is free now.
    pub available_bytes: u64,
    /// What takes most, over all ranks of a role.
    pub largest: Use,
    /// Of which role.
    pub largest_role: Role,
    /// Its bytes.
    pub largest_bytes: u64,
}

/// How a host's memory falls short.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shortage {
    /// The host never has so much.
    Never(String),
    /// It has not so much now.
    Now(String),
}

impl HostMemory {
    pub(crate) fn new(host: &str, tenants: &[Tenant], coordinator_bytes: u64, machine: Machine) -> Self {
        let mut uses: BTreeMap<(Use, Role), u64> = BTreeMap::new();
        let (mut private, mut mapped) = (coordinator_bytes, 0);
        let mut mappings = Vec::new();
        for tenant in tenants {
            let is_shared = tenant.mapping.is_some() && mappings.contains(&tenant.mapping);
            mappings.push(tenant.mapping);
            for part in tenant.parts.iter().filter(|part| !(part.mapped && is_shared)) {
                *uses.entry((part.r#use, tenant.role)).or_default() += part.bytes;
                if part.mapped {
                    mapped += part.bytes;
                } else {
                    private += part.bytes;
                }
            }
        }
        let largest = uses.into_iter().max_by_key(|(_, bytes)| *bytes);
        let ((largest, largest_role), largest_bytes) = largest.unwrap_or(((Use::Process, Role::Draft), 0));
        Self {
            host: host.to_owned(),
            private_bytes: private,
            mapped_bytes: mapped,
            memory_bytes: machine.memory_bytes,
            available_bytes: machine.available_bytes,
            largest,
            largest_role,
            largest_bytes,
        }
    }

    /// All that is needed.
    pub fn needed_bytes(&self) -> u64 {
        self.private_bytes + self.mapped_bytes
    }

    /// What is wrong, if there is too little.
    pub(crate) fn shortage(&self) -> Option<Shortage> {
        let needed = self.needed_bytes();
        if needed <= self.available_bytes {
            return None;
        }
        let held = if self.available_bytes < self.memory_bytes {
            format!(
                "{} of its {} are free",
                size(self.available_bytes),
                size(self.memory_bytes)
            )
        } else {
            format!("it has {}", size(self.memory_bytes))
        };
        let text = format!(
            "the ranks on host {} need {} of memory and {held}; {} of {} ranks take most of it, {}: {}",
            self.host,
            size(needed),
            self.largest.words(),
            self.largest_role,
            size(self.largest_bytes),
            self.largest.remedy(self.largest_role),
        );
        Some(if self.private_bytes > self.memory_bytes {
            Shortage::Never(text)
        } else {
            Shortage::Now(text)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(memory: u64, available: u64, mappings: &[Option<(u16, u16)>]) -> HostMemory {
        let tenants: Vec<Tenant> = mappings
            .iter()
            .map(|&mapping| Tenant {
                role: Role::Verifier,
                parts: vec![
                    MemoryPart {
                        mapped: true,
                        ..MemoryPart::new(Use::Weights, 500)
                    },
                    MemoryPart::new(Use::Activations, 40),
                ],
                mapping,
            })
            .collect();
        let machine = Machine {
            cores: 1,
            memory_bytes: memory,
            available_bytes: available,
        };
        HostMemory::new("local", &tenants, 20, machine)
    }

    #[test]
    fn replicas_on_a_host_share_what_they_map() {
        let two = host(10_000, 10_000, &[Some((0, 0)), Some((0, 0))]);
        assert_eq!((two.private_bytes, two.mapped_bytes), (100, 500));
        let stages = host(10_000, 10_000, &[Some((0, 0)), Some((1, 0))]);
        assert_eq!((stages.private_bytes, stages.mapped_bytes), (100, 1000));
        assert_eq!((stages.largest, stages.largest_bytes), (Use::Weights, 1000));
        assert_eq!(stages.shortage(), None);
    }

    #[test]
    fn too_little_is_told_with_the_largest_lever_and_mapped_pages_can_be_dropped() {
        let seats = [Some((0, 0)), Some((1, 0))];
        let Some(Shortage::Now(text)) = host(1050, 1050, &seats).shortage() else {
            panic!("1100 are needed")
        };
        assert!(
            text.contains("weights of verifier ranks") && text.contains("quantised"),
            "{text}"
        );
        let Some(Shortage::Now(text)) = host(10_000, 900, &seats).shortage() else {
            panic!("1100 are needed")
        };
        assert!(text.contains("are free"), "{text}");
        assert!(matches!(
            host(99, 99, &seats).shortage(),
            Some(Shortage::Never(_))
        ));
    }
}
