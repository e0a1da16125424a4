//! `eaglet check`: what is known of a cluster before it is launched, for people and as JSON.

use std::io::Write;

use anyhow::Result;
use eaglet_actors::preflight::{
    self, Cargo, CheckOptions, DiskPlan, GpuPlan, HostMemory, LinkPlan, Machine, Per, RankPlan, Report,
    SampleBudget, SampleSurvey, SideSpeed, SpeedSource, SupplyPlan, Use, VocabularySurvey, Waiting, prefixed,
    size,
};
use eaglet_runtime::hub::Need;
use eaglet_runtime::ids::Role;

use crate::cli::{CheckArgs, Exit};
use crate::launch::complain;
use crate::live::format::{duration, grouped, short};
use crate::samples::{print, visible};
use crate::table::Table;
use crate::{extract, fetch, run};

/// Reasons for refusal that are shown.
const SHOWN_REASONS: usize = 4;

/// Checks a cluster file and prints what was found; nothing is changed.
///
/// # Errors
/// If stdout cannot be written to.
pub(crate) fn command(arguments: &CheckArgs) -> Result<Exit> {
    let mut survey = match &arguments.extract {
        Some(out) => extract::survey(&arguments.cluster, &arguments.sets, out),
        None => run::survey(&arguments.cluster, &arguments.sets),
    };
    let is_on_hub = survey.config.verifier.hub_model().is_some();
    if survey.problems.is_empty()
        && let Err(error) = fetch::verifier(&mut survey.config, Need::Tokenizer)
    {
        complain(&error.to_string());
        return Ok(Exit::BadInput);
    }
    let mut options = CheckOptions::here();
    options.weights_come_later = is_on_hub;
    if let Some(bytes) = arguments.memory {
        options.machine = Machine::here().with_memory(bytes);
    }
    options.flops_per_s = arguments.flops;
    options.free_disk_bytes = arguments.disk;
    options.samples = SampleBudget {
        rows: arguments.samples,
        ..options.samples
    };
    let report = preflight::check(&survey, &arguments.cluster.display().to_string(), &options);
    let refused = !report.ok || (arguments.strict && !report.warnings.is_empty());
    let printed = print(|out| {
        if arguments.json {
            serde_json::to_writer_pretty(&mut *out, &report)?;
            return Ok(writeln!(out)?);
        }
        write(&report, arguments.strict, out)
    })?;
    Ok(if refused { Exit::BadInput } else { printed })
}

/// Writes a report for people: the plans first, what is wrong last.
fn write(report: &Report, strict: bool, out: &mut dyn Write) -> Result<()> {
    writeln!(
        out,
        "{}: run {} in {}",
        report.cluster,
        report.run,
        report.directory.display()
    )?;
    about(report, out)?;
    if !report.ranks.is_empty() {
        writeln!(out)?;
        ranks(&report.ranks, out)?;
        for host in &report.hosts {
            writeln!(out, "{}", memory(host))?;
        }
    }
    if !report.gpus.is_empty() {
        writeln!(out)?;
        gpus(&report.gpus, out)?;
    }
    if let Some(nccl) = &report.nccl {
        writeln!(
            out,
            "{} are summed over NCCL {}, {}",
            nccl.sums.join(" and "),
            nccl.version,
            nccl.path.display()
        )?;
    }
    if !report.links.is_empty() {
        writeln!(out)?;
        links(&report.links, out)?;
    }
    if let Some(disk) = &report.disk {
        writeln!(out, "\n{:<11} {}", "disk", disk_line(disk))?;
    }
    if let Some(samples) = &report.samples {
        for line in sample_lines(samples) {
            writeln!(out, "{:<11} {}", "samples", visible(&line))?;
        }
    }
    if let Some(vocabulary) = &report.vocabulary {
        writeln!(out, "{:<11} {}", "vocabulary", vocabulary_line(vocabulary))?;
    }
    if let Some(supply) = &report.supply {
        for line in supply_lines(supply) {
            writeln!(out, "{:<11} {line}", "speed")?;
        }
    }
    if !(report.problems.is_empty() && report.warnings.is_empty()) {
        writeln!(out)?;
    }
    for finding in &report.problems {
        writeln!(out, "problem: {}", visible(&finding.to_string()))?;
    }
    for finding in &report.warnings {
        writeln!(out, "warning: {}", visible(&finding.to_string()))?;
    }
    writeln!(out, "\n{}", verdict(report, strict))?;
    Ok(())
}

fn verdict(report: &Report, strict: bool) -> String {
    let count = |number: usize, noun: &str| match number {
        0 => format!("no {noun}s"),
        1 => format!("1 {noun}"),
        number => format!("{number} {noun}s"),
    };
    let (problems, warnings) = (
        count(report.problems.len(), "problem"),
        count(report.warnings.len(), "warning"),
    );
    let end = match (report.ok, strict && !report.warnings.is_empty()) {
        (false, _) => "a launch would not go well",
        (true, true) => "a launch would go well, but --strict asks for no warnings",
        (true, false) => "a launch would go well",
    };
    format!("{problems}, {warnings}: {end}")
}

/// What verifier, draft and captured layers are.
fn about(report: &Report, out: &mut dyn Write) -> Result<()> {
    let mut line = |name: &str, text: String| writeln!(out, "{name:<11} {text}");
    if let Some(verifier) = &report.verifier {
        line(
            "verifier",
            format!(
                "{}: {} layers of width {}, vocabulary of {}; {} parameters in {} tensors, {}",
                verifier.model_type,
                verifier.layers,
                verifier.hidden_size,
                verifier.vocab_size,
                parameters(verifier.parameters),
                grouped(verifier.tensors),
                size(verifier.bytes)
            ),
        )?;
    }
    if let Some(draft) = &report.draft {
        line(
            "draft",
            format!(
                "{}: {} heads of {} ({} of keys), MLP of {}, vocabulary of {}; {} parameters are trained",
                draft.arch,
                draft.heads,
                draft.head_dim,
                draft.kv_heads,
                draft.intermediate_size,
                draft.vocab_size,
                parameters(draft.parameters)
            ),
        )?;
    }
    if let Some(layers) = &report.layers {
        line(
            "layers",
            format!(
                "input of {:?} (vLLM, speculators) = output of {:?} (SGLang, SpecForge); and the last state, {}",
                layers.input_of, layers.output_of, layers.last
            ),
        )?;
    }
    Ok(())
}

/// Columns of the table of ranks, and what is summed in each.
const COLUMNS: [(&str, &[Use]); 7] = [
    ("weights", &[Use::Weights, Use::PackedWeights, Use::Frozen]),
    ("state", &[Use::OptimizerState]),
    ("gradients", &[Use::Gradient]),
    ("exchange", &[Use::Exchange]),
    ("activations", &[Use::Activations, Use::Logits, Use::Answers]),
    ("hidden", &[Use::HiddenStates]),
    ("rest", &[Use::Links, Use::Process]),
];

fn ranks(ranks: &[RankPlan], out: &mut dyn Write) -> Result<()> {
    let names = COLUMNS.map(|(name, _)| name);
    let mut table = Table::new([
        "rank",
        "holds",
        "threads",
        "parameters",
        names[0],
        names[1],
        names[2],
        names[3],
        names[4],
        names[5],
        names[6],
        "memory",
    ])
    .align_right(&[2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    for rank in ranks {
        let holds = match &rank.shard {
            None if rank.role == Role::Verifier => "files to read".to_owned(),
            None if rank.parameters == 0 => "files to write".to_owned(),
            None => "the draft".to_owned(),
            Some(shard) if shard.stages * shard.slices == 1 => "the verifier".to_owned(),
            Some(shard) => {
                let mut text = format!(
                    "layers {}-{}",
                    shard.first_layer,
                    shard.end_layer.saturating_sub(1)
                );
                if shard.slices > 1 {
                    text.push_str(&format!(", slice {}/{}", shard.slice, shard.slices));
                }
                text
            }
        };
        let cells = COLUMNS.map(|(_, uses)| {
            let parts = rank.memory.iter().filter(|part| uses.contains(&part.r#use));
            match parts.map(|part| part.bytes).sum::<u64>() {
                0 => "-".to_owned(),
                bytes => size(bytes),
            }
        });
        let [a, b, c, d, e, f, g] = cells;
        table.push([
            rank.seat.clone(),
            holds,
            rank.threads.to_string(),
            parameters(rank.parameters),
            a,
            b,
            c,
            d,
            e,
            f,
            g,
            size(rank.memory_bytes),
        ]);
    }
    Ok(table.write(out)?)
}

fn memory(host: &HostMemory) -> String {
    format!(
        "host {}: {} in all, of which {} are mapped files; {} of {} are free",
        host.host,
        size(host.needed_bytes()),
        size(host.mapped_bytes),
        size(host.available_bytes),
        size(host.memory_bytes)
    )
}

fn gpus(gpus: &[GpuPlan], out: &mut dyn Write) -> Result<()> {
    let mut table = Table::new(["GPU", "name", "memory", "free", "needed", "NUMA node", "ranks"])
        .align_right(&[2, 3, 4, 5]);
    let unknown = |bytes: Option<u64>| bytes.map_or("unknown".to_owned(), size);
    for gpu in gpus {
        let ranks: Vec<String> = gpu
            .ranks
            .iter()
            .map(|rank| format!("{} {}", rank.seat, size(rank.bytes)))
            .collect();
        table.push([
            gpu.device.clone(),
            gpu.name.clone(),
            unknown(gpu.memory_bytes),
            unknown(gpu.free_bytes),
            size(gpu.needed_bytes),
            gpu.numa_node.map_or("-".to_owned(), |node| node.to_string()),
            ranks.join(", "),
        ]);
    }
    table.write(out)?;
    for gpu in gpus.iter().filter(|gpu| !gpu.unread_peers.is_empty()) {
        writeln!(
            out,
            "note: {} cannot read the memory of {}: what goes between them passes through the host",
            gpu.device,
            gpu.unread_peers.join(", ")
        )?;
    }
    Ok(())
}

fn links(links: &[LinkPlan], out: &mut dyn Write) -> Result<()> {
    let mut table = Table::new(["link", "from", "to", "bytes", "per", "per second"]).align_right(&[3, 5]);
    for link in links {
        let cargo = match link.cargo {
            Cargo::HiddenStates => "hidden states",
            Cargo::Residual => "residual stream",
            Cargo::SliceSums => "sums of slices",
            Cargo::Gradients => "gradients",
            Cargo::State => "weights and moments",
        };
        let per = match link.per {
            Per::Token => "token",
            Per::Step => "step",
            Per::Replacement => "replacement",
        };
        table.push([
            cargo.to_owned(),
            link.from.clone(),
            link.to.clone(),
            grouped(link.bytes),
            per.to_owned(),
            link.bytes_per_s
                .map_or("-".to_owned(), |bytes| format!("{}/s", size(bytes as u64))),
        ]);
    }
    Ok(table.write(out)?)
}

fn disk_line(disk: &DiskPlan) -> String {
    let free = disk.free_bytes.map_or("free room is unknown".to_owned(), |free| {
        format!("{} are free", size(free))
    });
    let present = match disk.present_bytes {
        0 => String::new(),
        bytes => format!(", {} of it there already", size(bytes)),
    };
    let states = match disk.hidden_state_bytes {
        0 => String::new(),
        bytes => format!("hidden states {}, ", size(bytes)),
    };
    let checkpoints = match disk.checkpoint_bytes {
        0 => String::new(),
        bytes => format!("{} checkpoints of {}, ", disk.checkpoints, size(bytes)),
    };
    format!(
        "{}{present}: {states}{checkpoints}samples {}, journal and logs {}; {free}",
        size(disk.total_bytes),
        size(disk.sample_bytes),
        size(disk.journal_bytes)
    )
}

fn sample_lines(samples: &SampleSurvey) -> Vec<String> {
    let share = |part: u64, all: u64| 100.0 * part as f64 / all.max(1) as f64;
    let extent = if samples.whole { "all" } else { "the first" };
    let mut lines = vec![
        format!(
            "{} samples in {extent} {} rows, {} tokens, {:.0} % of them trained; the longest has {}, {:.1} % are cut",
            grouped(samples.samples),
            grouped(samples.rows),
            grouped(samples.tokens),
            share(samples.trained_tokens, samples.tokens),
            grouped(samples.longest_tokens),
            share(samples.truncated, samples.samples),
        ),
        format!(
            "{}{} samples, {} tokens a pass, {} steps; rows are filled with {:.0} tokens; {} held-out prompts",
            if samples.whole { "" } else { "about " },
            grouped(samples.estimated_samples),
            short(samples.estimated_tokens as f64),
            grouped(samples.steps),
            samples.tokens_per_row,
            samples.held_out_prompts,
        ),
    ];
    for refusal in samples.refused.iter().take(SHOWN_REASONS) {
        lines.push(format!(
            "put aside, {}: {} (first {})",
            refusal.reason, refusal.count, refusal.first
        ));
    }
    let more: u64 = samples
        .refused
        .iter()
        .skip(SHOWN_REASONS)
        .map(|refusal| refusal.count)
        .sum();
    if more > 0 {
        lines.push(format!("put aside for other reasons: {more}"));
    }
    lines
}

fn vocabulary_line(vocabulary: &VocabularySurvey) -> String {
    let unseen = vocabulary.unseen_coverage.map_or(String::new(), |coverage| {
        format!(
            "; counted on one half it covers {:.2} % of the other",
            100.0 * coverage
        )
    });
    format!(
        "{} of {} tokens cover {:.2} % of {} trained ones, {} of them different{unseen}",
        grouped(vocabulary.draft_vocab_size as u64),
        grouped(vocabulary.verifier_vocab_size as u64),
        100.0 * vocabulary.coverage,
        grouped(vocabulary.trained_tokens),
        grouped(vocabulary.distinct_tokens as u64)
    )
}

fn supply_lines(supply: &SupplyPlan) -> Vec<String> {
    let source = match supply.speed.source {
        SpeedSource::Measured => "measured products",
        SpeedSource::Given => "--flops",
    };
    let waiting = match supply.waiting {
        Waiting::Neither => "neither side waits".to_owned(),
        side => {
            let who = if side == Waiting::Verifier {
                "verifier"
            } else {
                "draft"
            };
            format!("{who} ranks wait {:.0} % of the time", 100.0 * supply.idle_share)
        }
    };
    let advice = supply
        .advice()
        .map_or(String::new(), |advice| format!(": {advice}"));
    let part = |side: &Option<SideSpeed>, what: &str| {
        side.map(|side| {
            let speed = short(side.tokens_per_s);
            format!(
                "{speed} tokens/s are {what} ({}FLOP each)",
                prefixed(side.flops_per_token)
            )
        })
    };
    let sides = [
        part(&supply.verifier, "extracted"),
        part(&supply.draft, "trained"),
    ];
    let sides: Vec<String> = sides.into_iter().flatten().collect();
    let mut lines = vec![format!("at most {}, by {source}", sides.join(" and "))];
    if sides.len() == 2 {
        lines.push(format!("{waiting}{advice}"));
    }
    if let (Some(steps), Some(seconds)) = (supply.steps, supply.duration_s) {
        lines.push(format!(
            "{} steps take {} at least, {:.2} steps/s",
            grouped(steps),
            duration(seconds.ceil() as u64),
            supply.steps_per_s
        ));
    }
    lines
}

/// A number of parameters, as models are named: `829 M`, `135 B`.
fn parameters(count: u64) -> String {
    prefixed(count as f64).trim_end().replace('G', "B")
}
