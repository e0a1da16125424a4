//! Bandwidth of a link against a plain copy in the same run.
//!
//! `cargo bench -p eaglet-runtime --bench link` prints GB/s (10^9 bytes), best and median of several rounds: messages of
//! 1, 16 and 64 MiB from one thread's link to another's, every byte copied into the ring and out of it. Words behind `--`
//! choose the lines that contain them.

#![allow(clippy::print_stdout)]

use std::hint::black_box;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use bytes::Bytes;
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Generation, Seat, Step};
use eaglet_runtime::link::{
    BulkEvent, BulkKind, BulkListener, BulkOutgoing, BulkSender, Endpoint, Hello, ListenerOptions,
    SenderOptions, StateKind,
};

const ROUNDS: usize = 9;
const BYTES_PER_ROUND: usize = 512 << 20;
const LIMIT: Duration = Duration::from_secs(60);

/// Processor time of all threads of this process so far, to 10 ms.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("every Linux has it");
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    // The 14th and 15th of the line, in ticks, which are 10 ms on every Linux that Rust runs on.
    fields
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<f64>().ok())
        .sum::<f64>()
        / 100.0
}

/// Times rounds of `BYTES_PER_ROUND` bytes; prints the best and the median rate, and the bytes per processor second, which
/// hardly depends on what else the machine does.
fn report(what: &str, mib: usize, mut round: impl FnMut()) {
    let line = format!("{mib:>3} MiB  {what}");
    if std::env::args()
        .skip(1)
        .any(|word| !word.starts_with('-') && !line.contains(&word))
    {
        return;
    }
    round();
    let start_cpu_seconds = cpu_seconds();
    let mut rates: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            round();
            BYTES_PER_ROUND as f64 / start.elapsed().as_secs_f64() / 1e9
        })
        .collect();
    let cpu_rate = (ROUNDS * BYTES_PER_ROUND) as f64 / (cpu_seconds() - start_cpu_seconds) / 1e9;
    rates.sort_by(f64::total_cmp);
    let (best, median) = (rates[ROUNDS - 1], rates[ROUNDS / 2]);
    println!("{line:<37} best {best:>5.1}  median {median:>5.1} GB/s  {cpu_rate:>5.1} GB/CPU-s");
}

fn open(checksum: bool) -> (BulkListener, BulkSender, Receiver<BulkEvent>) {
    let name = format!("eaglet-bench-{}-{checksum}", std::process::id());
    let to = Endpoint {
        seat: Seat::draft(0),
        generation: Generation(0),
    };
    let from = Endpoint {
        seat: Seat::verifier(0),
        generation: Generation(0),
    };
    let (sender, events) = mpsc::channel();
    let inbox = move |event| {
        let _ = sender.send(event);
    };
    let listener =
        BulkListener::bind(&name, to, ListenerOptions::default(), inbox).expect("the name is free");
    let options = SenderOptions {
        checksum,
        ..SenderOptions::default()
    };
    let hello = Hello {
        from,
        epoch: Epoch(0),
        to,
    };
    let sender = BulkSender::connect(&name, hello, options, |_| {}).expect("it listens");
    (listener, sender, events)
}

fn message(part: &Bytes) -> BulkOutgoing {
    let kind = BulkKind::State {
        step: Step(0),
        what: StateKind::Weights,
        digest: Digest::default(),
        elements: part.len() as u64 / 4,
        first_element: 0,
    };
    BulkOutgoing {
        epoch: Epoch(0),
        kind,
        parts: vec![part.clone()],
    }
}

fn main() {
    for mib in [1, 16, 64] {
        let (bytes, count) = (mib << 20, BYTES_PER_ROUND / (mib << 20));
        let source: Vec<u8> = (0..bytes).map(|i| ((i * 31) >> 7) as u8).collect();
        let mut target = vec![1; bytes];
        report("copy", mib, || {
            for _ in 0..count {
                target.copy_from_slice(black_box(&source));
                black_box(&mut target);
            }
        });
        report("crc32c", mib, || {
            for _ in 0..count {
                black_box(crc32c::crc32c(black_box(&source)));
            }
        });
        report("xxh3", mib, || {
            for _ in 0..count {
                black_box(xxhash_rust::xxh3::xxh3_64(black_box(&source)));
            }
        });
        let part = Bytes::from(source);
        for checksum in [false, true] {
            let (_listener, sender, events) = open(checksum);
            let what = if checksum {
                "link, copied twice, crc32c"
            } else {
                "link, copied twice"
            };
            report(what, mib, || {
                let (mut sent, mut received) = (0, 0);
                while received < count {
                    while sent < count && sender.try_send(message(&part)).is_ok() {
                        sent += 1;
                    }
                    if let BulkEvent::Message(message) = events.recv_timeout(LIMIT).expect("messages come") {
                        assert_eq!(message.parts[0].len(), bytes);
                        received += 1;
                    }
                }
            });
        }
    }
}
