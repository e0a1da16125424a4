//! `eaglet ranks`: the ranks of a live run.

use std::io::Write;

use anyhow::Result;
use eaglet_runtime::control::{OperatorReply, OperatorRequest, RankLine};

use crate::cli::{Exit, RanksCommand};
use crate::live::bytes;
use crate::table::Table;
use crate::{launch, run, samples};

/// Carries out a command about ranks.
///
/// # Errors
/// If there are no threads to ask with, or stdout cannot be written to.
pub(crate) fn command(command: &RanksCommand) -> Result<Exit> {
    match command {
        RanksCommand::List { json, run } => match run::answer(run, OperatorRequest::Ranks)? {
            Ok(OperatorReply::Ranks(ranks)) => samples::print(|out| write(&ranks, *json, out)),
            Ok(OperatorReply::Refused(text) | OperatorReply::Done(text)) => {
                launch::complain(&text);
                Ok(Exit::Failed)
            }
            Err(exit) => Ok(exit),
        },
        RanksCommand::Add { role, threads, run } => {
            let (role, threads) = ((*role).into(), usize::from(*threads));
            run::ask(run, OperatorRequest::AddRank { role, threads })
        }
        RanksCommand::Remove { seat, run } => run::ask(run, OperatorRequest::RemoveRank { seat: *seat }),
        RanksCommand::Restart { seat, run } => run::ask(run, OperatorRequest::RestartRank { seat: *seat }),
    }
}

fn write(ranks: &[RankLine], json: bool, out: &mut dyn Write) -> Result<()> {
    if json {
        return Ok(writeln!(out, "{}", serde_json::to_string(ranks)?)?);
    }
    let headings = [
        "seat", "gen", "state", "pid", "restarts", "memory", "lanes", "beat", "detail",
    ];
    let mut table = Table::new(headings).align_right(&[1, 3, 4, 5, 7]);
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for rank in ranks {
        let lanes: Vec<String> = rank.lanes.iter().map(u16::to_string).collect();
        table.push([
            rank.seat.to_string(),
            rank.generation.to_string(),
            rank.state.clone(),
            or_dash(rank.pid.map(|pid| pid.to_string())),
            rank.restarts.to_string(),
            or_dash((rank.rss_bytes > 0).then(|| bytes(rank.rss_bytes))),
            or_dash((!lanes.is_empty()).then(|| lanes.join(","))),
            or_dash(rank.beat_age_ms.map(|age| format!("{age} ms"))),
            rank.detail.clone(),
        ]);
    }
    Ok(table.write(out)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use eaglet_runtime::ids::{Generation, Seat};

    #[test]
    fn ranks_are_a_table_or_json() {
        let ranks = [
            RankLine {
                seat: Seat::draft(0),
                generation: Generation(2),
                state: "training".to_owned(),
                pid: Some(4711),
                restarts: 2,
                rss_bytes: 300 << 20,
                lanes: vec![0, 1],
                beat_age_ms: Some(40),
                detail: "summing gradients".to_owned(),
            },
            RankLine {
                seat: Seat::verifier(11),
                generation: Generation(0),
                state: "restarting".to_owned(),
                pid: None,
                restarts: 0,
                rss_bytes: 0,
                lanes: Vec::new(),
                beat_age_ms: None,
                detail: String::new(),
            },
        ];
        let shown = |json| {
            let mut out = Vec::new();
            write(&ranks, json, &mut out).expect("memory can be written to");
            String::from_utf8(out).expect("texts only")
        };
        assert_eq!(
            shown(false),
            "seat         gen  state        pid  restarts   memory  lanes   beat  detail\n\
             draft-0        2  training    4711         2  300 MiB  0,1    40 ms  summing gradients\n\
             verifier-11    0  restarting     -         0        -  -          -\n"
        );
        let json: serde_json::Value = serde_json::from_str(&shown(true)).expect("JSON");
        assert_eq!(json[0]["seat"]["role"], "draft");
        assert_eq!(
            (&json[0]["pid"], &json[1]["pid"]),
            (&4711.into(), &serde_json::Value::Null)
        );
    }
}
