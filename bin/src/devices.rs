//! `eaglet devices`: the CPUs and GPUs of this machine, or why it has none.

use std::io::Write;

use anyhow::Result;
use eaglet_runtime::cuda::{GpuSurvey, SearchPath};
use serde::Serialize;

use crate::cli::{DevicesArgs, Exit};
use crate::samples::print;
use crate::table::Table;

/// Everything that computes on this machine.
#[derive(Debug, Serialize)]
struct Devices {
    cpu: Cpu,
    #[serde(flatten)]
    gpus: GpuSurvey,
}

/// The processors.
#[derive(Debug, Default, Serialize)]
struct Cpu {
    model: String,
    /// Threads that this process may run on.
    threads: usize,
    /// Cores of the machine.
    cores: usize,
    memory_bytes: u64,
    numa_nodes: usize,
    avx2: bool,
    avx512: bool,
    amx_bf16: bool,
}

impl Cpu {
    fn here() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let nodes = std::fs::read_dir("/sys/devices/system/node")
            .into_iter()
            .flatten();
        let numa_nodes = nodes
            .flatten()
            .filter(|entry| {
                let name = entry.file_name();
                let number = name.to_string_lossy();
                number
                    .strip_prefix("node")
                    .is_some_and(|number| number.parse::<u32>().is_ok())
            })
            .count();
        Self {
            threads,
            memory_bytes: total_memory(&read("/proc/meminfo")),
            numa_nodes: numa_nodes.max(1),
            ..Self::parse(&read("/proc/cpuinfo"))
        }
    }

    /// What `/proc/cpuinfo` says (proc(5)).
    fn parse(text: &str) -> Self {
        let values = |wanted: &str| {
            let wanted = wanted.to_owned();
            text.lines().filter_map(move |line| {
                let (key, value) = line.split_once(':')?;
                (key.trim() == wanted).then(|| value.trim().to_owned())
            })
        };
        let flags = values("flags").next().unwrap_or_default();
        let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
        let mut cores: Vec<(String, String)> = values("physical id").zip(values("core id")).collect();
        cores.sort();
        cores.dedup();
        let processors = values("processor").count();
        Self {
            model: values("model name")
                .next()
                .unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cores: if cores.is_empty() { processors } else { cores.len() },
            avx2: has("avx2") && has("fma"),
            avx512: ["avx512f", "avx512bw", "avx512dq", "avx512vl"]
                .iter()
                .all(|flag| has(flag)),
            amx_bf16: has("amx_tile") && has("amx_bf16"),
            ..Self::default()
        }
    }

    fn instructions(&self) -> String {
        let named = [
            ("AVX2", self.avx2),
            ("AVX-512", self.avx512),
            ("AMX bf16", self.amx_bf16),
        ];
        let has: Vec<&str> = named
            .iter()
            .filter(|(_, has)| *has)
            .map(|(name, _)| *name)
            .collect();
        if has.is_empty() {
            "no vector instructions that eaglet looks for".to_owned()
        } else {
            has.join(", ")
        }
    }
}

/// The `MemTotal` line of `/proc/meminfo`, in bytes.
fn total_memory(text: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.strip_prefix("MemTotal:"))
        .filter_map(|value| value.trim().trim_end_matches("kB").trim().parse::<u64>().ok())
        .map(|kib| kib * 1024)
        .next()
        .unwrap_or(0)
}

/// Prints what this machine has.
///
/// # Errors
/// If stdout cannot be written to.
pub(crate) fn command(arguments: &DevicesArgs) -> Result<Exit> {
    let devices = Devices {
        cpu: Cpu::here(),
        gpus: GpuSurvey::here(&SearchPath::here()),
    };
    print(|out| {
        if arguments.json {
            serde_json::to_writer_pretty(&mut *out, &devices)?;
            return Ok(writeln!(out)?);
        }
        write(&devices, out)
    })
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

fn write(devices: &Devices, out: &mut dyn Write) -> Result<()> {
    let (cpu, gpus) = (&devices.cpu, &devices.gpus);
    let plural = |count: usize, noun: &str| format!("{count} {noun}{}", if count == 1 { "" } else { "s" });
    writeln!(
        out,
        "cpu     {}: {}, {} here, {}, {}; {}",
        cpu.model,
        plural(cpu.cores, "core"),
        plural(cpu.threads, "thread"),
        gigabytes(cpu.memory_bytes),
        plural(cpu.numa_nodes, "NUMA node"),
        cpu.instructions()
    )?;
    if !gpus.gpus.is_empty() {
        writeln!(out)?;
        let headings = ["device", "name", "memory", "capability", "processors", "reads"];
        let mut table = Table::new(headings).align_right(&[2, 3, 4]);
        for (gpu, peers) in gpus.gpus.iter().zip(&gpus.peer_access) {
            let peers: Vec<String> = gpus
                .gpus
                .iter()
                .zip(peers)
                .filter(|(peer, can)| **can && peer.device != gpu.device)
                .map(|(peer, _)| peer.device.clone())
                .collect();
            table.push([
                gpu.device.clone(),
                format!("{}{}", gpu.name, if gpu.is_part { " (a part: MIG)" } else { "" }),
                gigabytes(gpu.memory_bytes),
                gpu.capability.clone(),
                gpu.multiprocessors.to_string(),
                if peers.is_empty() {
                    "no other".to_owned()
                } else {
                    peers.join(" ")
                },
            ]);
        }
        table.write(out)?;
        writeln!(out)?;
    }
    for (name, version) in [
        ("driver", &gpus.driver),
        ("CUDA", &gpus.driver_cuda),
        ("NCCL", &gpus.nccl),
    ] {
        if let Some(version) = version {
            writeln!(out, "{name:<7} {version}")?;
        }
    }
    for library in &gpus.libraries {
        writeln!(out, "found   {} as {}", library.library, library.path)?;
    }
    if gpus.gpus.is_empty() {
        writeln!(out, "no GPU can be used:")?;
    }
    for problem in &gpus.problems {
        writeln!(out, "missing {problem}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted_by_cores_and_instructions_by_flags() {
        let processor = |processor: u32, core: u32| {
            format!(
                "processor\t: {processor}\nmodel name\t: Some CPU @ 2.00GHz\nphysical id\t: 0\ncore id\t\t: {core}\n\
                 flags\t\t: fpu avx2 fma avx512f avx512bw avx512dq avx512vl amx_tile amx_bf16\n\n"
            )
        };
        let text: String = (0..4).map(|i| processor(i, i / 2)).collect();
        let cpu = Cpu::parse(&text);
        assert_eq!((cpu.model.as_str(), cpu.cores), ("Some CPU @ 2.00GHz", 2));
        assert!(cpu.avx2 && cpu.avx512 && cpu.amx_bf16);
        let without = Cpu::parse(&text.replace("avx512vl", "other").replace(" fma", ""));
        assert!(!without.avx2 && !without.avx512 && without.amx_bf16);
        let other = Cpu::parse("processor : 0\nFeatures : fp asimd\n");
        assert_eq!(other.cores, 1);
        assert_eq!(
            other.instructions(),
            "no vector instructions that eaglet looks for"
        );
        assert_eq!(
            total_memory("MemTotal:       2048 kB\nMemFree: 1 kB"),
            2048 * 1024
        );
    }

    #[test]
    fn a_machine_without_gpus_says_why() {
        let devices = Devices {
            cpu: Cpu::parse(""),
            gpus: GpuSurvey::here(&SearchPath::here()),
        };
        let mut out = Vec::new();
        write(&devices, &mut out).expect("written");
        let text = String::from_utf8(out).expect("text");
        assert!(
            !devices.gpus.gpus.is_empty() || text.contains("no GPU can be used:\nmissing "),
            "{text}"
        );
        assert_eq!(
            devices.gpus.gpus.is_empty(),
            text.contains("no GPU can be used"),
            "{text}"
        );
    }
}
