//! A tiny Hub: models in memory over HTTP/1.1, one request per connection, with faults on demand.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::json;

/// What a server does with the next bodies, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Closes the connection after so many bytes of the body.
    CutAfter(usize),
    /// Answers 500.
    Fail,
    /// Sends so many bytes and then nothing until the server is dropped.
    StallAfter(usize),
}

/// What is on the Hub, and what was asked for.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) commit: String,
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    /// Sizes that the listing claims, where they are not the files'.
    pub(crate) claimed: BTreeMap<String, u64>,
    pub(crate) token: Option<String>,
    pub(crate) faults: Vec<Fault>,
    /// Files whose bodies were asked for, with the first byte of the range.
    pub(crate) bodies: Vec<(String, u64)>,
}

/// The server; its threads end with it.
pub(crate) struct Server {
    pub(crate) endpoint: String,
    state: Arc<Mutex<State>>,
    /// Dropped to let stalled connections go.
    _open: Sender<()>,
}

/// The model's name.
pub(crate) const REPO: &str = "owner/model";

impl Server {
    pub(crate) fn new(commit: &str, files: &[(&str, &[u8])]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        let files = files
            .iter()
            .map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec()));
        let state = Arc::new(Mutex::new(State {
            commit: commit.to_owned(),
            files: files.collect(),
            ..State::default()
        }));
        let (open, closed) = channel();
        let closed = Arc::new(Mutex::new(closed));
        let served = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (state, closed) = (Arc::clone(&served), Arc::clone(&closed));
                // A client that goes away in the middle is what some tests are about.
                std::thread::spawn(move || serve(stream, &state, &closed).ok());
            }
        });
        Self {
            endpoint,
            state,
            _open: open,
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics with it")
    }

    /// Names and first bytes of the bodies asked for since the last call.
    pub(crate) fn bodies(&self) -> Vec<(String, u64)> {
        std::mem::take(&mut self.state().bodies)
    }
}

fn etag(bytes: &[u8]) -> String {
    let sum = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, &byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{sum:016x}")
}

fn serve(mut stream: TcpStream, state: &Mutex<State>, closed: &Mutex<Receiver<()>>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut request = String::new();
    reader.read_line(&mut request)?;
    let (mut range, mut token) = (None, None);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? <= 2 {
            break;
        }
        let (name, value) = line.trim().split_once(": ").unwrap_or_default();
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                range = value
                    .strip_prefix("bytes=")
                    .and_then(|range| range.split_once('-'))
                    .map(own)
            }
            "authorization" => token = value.strip_prefix("Bearer ").map(str::to_owned),
            _ => {}
        }
    }
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut known = state.lock().expect("no thread panics with it");
    if known.token.is_some() && known.token != token {
        return answer(&mut stream, "401 Unauthorized", &[], b"");
    }
    let commit = known.commit.clone();
    if path == format!("/api/models/{REPO}/revision/main?blobs=true")
        || path == format!("/api/models/{REPO}/revision/{commit}?blobs=true")
    {
        let siblings: Vec<_> = known
            .files
            .iter()
            .map(|(name, bytes)| {
                let size = known.claimed.get(name).copied().unwrap_or(bytes.len() as u64);
                json!({ "rfilename": name, "size": size })
            })
            .collect();
        let listing = json!({ "sha": commit, "siblings": siblings }).to_string();
        return answer(&mut stream, "200 OK", &[], listing.as_bytes());
    }
    let file = path
        .strip_prefix(&format!("/{REPO}/resolve/{commit}/"))
        .unwrap_or_default()
        .to_owned();
    let Some(bytes) = known.files.get(&file).cloned() else {
        return answer(&mut stream, "404 Not Found", &[], b"");
    };
    let (from, to) = range.unwrap_or_default();
    let from: usize = from.parse().unwrap_or(0);
    let end = to
        .parse()
        .map_or(bytes.len(), |to: usize| to + 1)
        .min(bytes.len());
    if from >= end {
        return answer(&mut stream, "416 Range Not Satisfiable", &[], b"");
    }
    let headers = [
        ("ETag", format!("\"{}\"", etag(&bytes))),
        ("X-Repo-Commit", commit),
        (
            "Content-Range",
            format!("bytes {from}-{}/{}", end - 1, bytes.len()),
        ),
    ];
    let body = &bytes[from..end];
    if to == "0" {
        drop(known);
        return answer(&mut stream, "206 Partial Content", &headers, body);
    }
    known.bodies.push((file, from as u64));
    let fault = if known.faults.is_empty() {
        None
    } else {
        Some(known.faults.remove(0))
    };
    drop(known);
    match fault {
        Some(Fault::Fail) => answer(&mut stream, "500 Internal Server Error", &[], b""),
        Some(Fault::CutAfter(len) | Fault::StallAfter(len)) => {
            head(&mut stream, "206 Partial Content", &headers, body.len())?;
            stream.write_all(&body[..len.min(body.len())])?;
            stream.flush()?;
            if matches!(fault, Some(Fault::StallAfter(_))) {
                // It ends in an error when the server is dropped, which is what is waited for.
                let _ = closed.lock().expect("no thread panics with it").recv();
            }
            Ok(())
        }
        None => answer(&mut stream, "206 Partial Content", &headers, body),
    }
}

fn own((from, to): (&str, &str)) -> (String, String) {
    (from.to_owned(), to.to_owned())
}

fn head(stream: &mut TcpStream, status: &str, headers: &[(&str, String)], len: usize) -> std::io::Result<()> {
    write!(
        stream,
        "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len}\r\n"
    )?;
    for (name, value) in headers {
        write!(stream, "{name}: {value}\r\n")?;
    }
    write!(stream, "\r\n")
}

fn answer(
    stream: &mut TcpStream,
    status: &str,
    headers: &[(&str, String)],
    body: &[u8],
) -> std::io::Result<()> {
    head(stream, status, headers, body.len())?;
    stream.write_all(body)
}
