//! L-3: peers between hosts whose requests and answers are written by hand.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::pin::Pin;
use std::task::{Context, Poll};

use ::http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http2::SendRequest;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::runtime::Runtime;

use super::*;
use crate::link::message::Encoded;

/// A body as a hostile peer makes it.
#[derive(Default)]
struct RawBody {
    chunks: VecDeque<Bytes>,
    /// Announced length, if another one than that of the chunks.
    announced: Option<u64>,
    /// Whether it breaks off after the chunks.
    breaks_off: bool,
}

impl Body for RawBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        match self.chunks.pop_front() {
            Some(chunk) => Poll::Ready(Some(Ok(Frame::data(chunk)))),
            None if self.breaks_off => Poll::Ready(Some(Err(std::io::Error::other("as it should")))),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.chunks.is_empty() && !self.breaks_off
    }

    fn size_hint(&self) -> SizeHint {
        match self.announced {
            Some(bytes) => SizeHint::with_exact(bytes),
            None if self.breaks_off => SizeHint::default(),
            None => SizeHint::with_exact(self.chunks.iter().map(|chunk| chunk.len() as u64).sum()),
        }
    }
}

/// A message with one part of 8 bytes, as requests carry it.
struct Posted {
    sequence: String,
    header_bytes: u64,
    message_bytes: u64,
    header: Vec<u8>,
    part: Vec<u8>,
    checksums: [u32; 2],
    tail: Vec<u8>,
}

impl Posted {
    fn new(sequence: u64) -> Self {
        let encoded =
            Encoded::new(&state(&[8], 1), Seat::verifier(1), Generation(1), 1 << 20).expect("small");
        let part = pattern(8, 1);
        Self {
            sequence: sequence.to_string(),
            header_bytes: encoded.header.len() as u64,
            message_bytes: encoded.message_bytes,
            checksums: [crc32c::crc32c(&encoded.header), crc32c::crc32c(&part)],
            header: encoded.header,
            part,
            tail: Vec::new(),
        }
    }

    fn body(&self) -> Vec<u8> {
        [
            &self.header[..],
            &self.checksums[0].to_le_bytes(),
            &self.part,
            &self.checksums[1].to_le_bytes(),
            &self.tail,
        ]
        .concat()
    }

    fn request(&self, body: RawBody) -> Request<RawBody> {
        Request::post("http://link/message")
            .header("eaglet-sequence", &self.sequence)
            .header("eaglet-header-bytes", self.header_bytes)
            .header("eaglet-message-bytes", self.message_bytes)
            .body(body)
            .expect("well formed")
    }

    /// Sent a few bytes at a time, which is allowed.
    fn whole(&self) -> Request<RawBody> {
        let chunks = self.body().chunks(5).map(Bytes::copy_from_slice).collect();
        self.request(RawBody {
            chunks,
            ..RawBody::default()
        })
    }
}

fn bare(method: &str, path: &str) -> ::http::request::Builder {
    Request::builder()
        .method(method)
        .uri(format!("http://link{path}"))
}

fn opening(token: &str, hello: &Hello) -> ::http::request::Builder {
    bare("POST", "/hello")
        .header("authorization", format!("Bearer {token}"))
        .header("eaglet-link", "1")
        .header("eaglet-checked", "1")
        .header("eaglet-hello", serde_json::to_string(hello).expect("plain"))
}

fn empty(request: ::http::request::Builder) -> Request<RawBody> {
    request.body(RawBody::default()).expect("well formed")
}

/// A sender whose requests are written by hand.
struct RawSender {
    runtime: Runtime,
    requests: SendRequest<RawBody>,
    welcome: Option<Incoming>,
}

impl RawSender {
    fn connect(bound: &Bound) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("threads are left");
        let address = bound.network().address;
        let requests = runtime.block_on(async {
            let socket = tokio::net::TcpStream::connect(address).await.expect("it listens");
            let (requests, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
                .handshake(TokioIo::new(socket))
                .await
                .expect("it speaks http/2");
            tokio::spawn(connection);
            requests
        });
        Self {
            runtime,
            requests,
            welcome: None,
        }
    }

    /// Says a good hello.
    fn open(bound: &Bound) -> Self {
        let mut raw = Self::connect(bound);
        let answer = raw.say(empty(opening(TOKEN, &hello(1)))).expect("an answer");
        assert_eq!(answer.status(), StatusCode::OK);
        raw.welcome = Some(answer.into_body());
        bound.opened();
        raw
    }

    fn say(&mut self, request: Request<RawBody>) -> hyper::Result<Response<Incoming>> {
        self.runtime.block_on(self.requests.send_request(request))
    }

    /// Says something that may not be answered.
    fn shout(&mut self, request: Request<RawBody>) {
        let _ = self.say(request);
    }

    fn told(&mut self) -> String {
        let welcome = self.welcome.take().expect("a welcome");
        let words = self.runtime.block_on(welcome.collect()).expect("words");
        String::from_utf8_lossy(&words.to_bytes()).into_owned()
    }
}

/// The raw sender's requests are right when nothing is done wrong, so the tests below test what they say.
#[test]
fn a_raw_sender_that_keeps_the_protocol_is_heard() {
    bounded(|| {
        let bound = bind(ListenerOptions::default());
        let mut raw = RawSender::open(&bound);
        for sequence in 0..3 {
            let answer = raw.say(Posted::new(sequence).whole()).expect("an answer");
            assert_eq!(answer.status(), StatusCode::OK);
            assert_same(&bound.message(), &state(&[8], 1));
        }
        let goodbye = empty(bare("POST", "/goodbye").header("eaglet-sequence", 3));
        assert_eq!(raw.say(goodbye).expect("an answer").status(), StatusCode::OK);
        assert_eq!(bound.closed(), None);

        // L-5: the same without a goodbye.
        let mut raw = RawSender::open(&bound);
        raw.shout(Posted::new(0).whole());
        assert_same(&bound.message(), &state(&[8], 1));
        drop(raw);
        let error = bound.closed();
        assert!(matches!(error, Some(LinkError::PeerLost { .. })), "{error:?}");
    });
}

/// L-3: whatever a sender does wrong ends its connection, says why, and harms nobody else.
#[test]
fn a_sender_that_breaks_the_protocol_is_put_out() {
    type Misdeed = fn(&mut RawSender);
    fn post(raw: &mut RawSender, change: fn(&mut Posted)) {
        let mut posted = Posted::new(0);
        change(&mut posted);
        raw.shout(posted.whole());
    }
    let misdeeds: [(&str, Misdeed); 21] = [
        ("message 1 where 0", |raw| raw.shout(Posted::new(1).whole())),
        ("message 0 where 1", |raw| {
            raw.shout(Posted::new(0).whole());
            raw.shout(Posted::new(0).whole());
        }),
        ("message 18446744073709551615", |raw| {
            raw.shout(Posted::new(u64::MAX).whole())
        }),
        ("is no number for eaglet-sequence", |raw| {
            post(raw, |posted| posted.sequence = "-1".to_owned())
        }),
        ("exceeds the limit", |raw| {
            post(raw, |posted| posted.message_bytes = u64::MAX)
        }),
        ("a header of 0 bytes", |raw| {
            post(raw, |posted| posted.header_bytes = 0)
        }),
        ("a header of 18446744073709551615 bytes", |raw| {
            post(raw, |posted| posted.header_bytes = u64::MAX)
        }),
        ("a header of 100 bytes in a message of 99", |raw| {
            post(raw, |posted| {
                (posted.header_bytes, posted.message_bytes) = (100, 99)
            })
        }),
        ("do not add up", |raw| {
            post(raw, |posted| posted.message_bytes = 1 << 29)
        }),
        ("is damaged", |raw| post(raw, |posted| posted.header[3] ^= 1)),
        ("is damaged", |raw| post(raw, |posted| posted.part[3] ^= 1)),
        ("is damaged", |raw| post(raw, |posted| posted.checksums[1] ^= 1)),
        ("cannot decode", |raw| {
            post(raw, |posted| {
                posted.header.fill(0xff);
                posted.checksums[0] = crc32c::crc32c(&posted.header);
            })
        }),
        ("goes on after its end", |raw| {
            post(raw, |posted| posted.tail = vec![7])
        }),
        ("ends before it is whole", |raw| {
            let posted = Posted::new(0);
            let body = posted.body();
            let chunks = [Bytes::copy_from_slice(&body[..body.len() - 6])].into();
            raw.shout(posted.request(RawBody {
                chunks,
                ..RawBody::default()
            }));
        }),
        // The same, and the length was announced: HTTP/2 notices.
        ("http/2", |raw| {
            let posted = Posted::new(0);
            let body = posted.body();
            let chunks = [Bytes::copy_from_slice(&body[..body.len() - 6])].into();
            let announced = Some(body.len() as u64);
            raw.shout(posted.request(RawBody {
                chunks,
                announced,
                breaks_off: false,
            }));
        }),
        ("in the middle of a message", |raw| {
            let posted = Posted::new(0);
            let chunks = [Bytes::copy_from_slice(&posted.body()[..20])].into();
            raw.shout(posted.request(RawBody {
                chunks,
                announced: None,
                breaks_off: true,
            }));
        }),
        ("came POST /hello", |raw| {
            raw.shout(empty(opening(TOKEN, &hello(1))))
        }),
        ("came GET /message", |raw| {
            raw.shout(empty(bare("GET", "/message")))
        }),
        ("came POST /elsewhere", |raw| {
            raw.shout(empty(bare("POST", "/elsewhere")))
        }),
        ("message 7 where 0", |raw| {
            raw.shout(empty(bare("POST", "/goodbye").header("eaglet-sequence", 7)))
        }),
    ];
    bounded(move || {
        let bound = bind(ListenerOptions::default());
        let good = bound.connect(Over::Network, small_ring());
        bound.opened();
        for (seed, (words, misdeed)) in (0..).zip(misdeeds) {
            let mut raw = RawSender::open(&bound);
            misdeed(&mut raw);
            if words == "message 0 where 1" {
                assert_same(&bound.message(), &state(&[8], 1));
            }
            let error = bound.closed().expect("no goodbye was said").to_string();
            assert!(error.contains(words), "`{error}` instead of `{words}`");
            assert_eq!(raw.told(), error);
            good.send(state(&[9_000], seed), LIMIT).expect("room comes");
            assert_same(&bound.message(), &state(&[9_000], seed));
        }
    });
}

/// L-3: hellos that are refused, and what is no hello.
#[test]
fn a_hello_is_checked_before_anything_else() {
    let good = || opening(TOKEN, &hello(1));
    let without = |name: &str| {
        let mut request = empty(good());
        request.headers_mut().remove(name);
        request
    };
    let with = |name: &'static str, value: &str| {
        let mut request = empty(good());
        request
            .headers_mut()
            .insert(name, ::http::HeaderValue::from_str(value).expect("well formed"));
        request
    };
    let requests = [
        ("token", without("authorization")),
        ("token", with("authorization", TOKEN)),
        ("token", with("authorization", "Bearer ")),
        ("token", empty(bare("POST", "/message"))),
        ("token", empty(bare("GET", "/"))),
        ("where a hello was expected came GET /hello", {
            let mut request = empty(good());
            *request.method_mut() = ::http::Method::GET;
            request
        }),
        ("where a hello was expected came POST /message", {
            let mut request = empty(good());
            *request.uri_mut() = "http://link/message".parse().expect("well formed");
            request
        }),
        ("version 99, this binary speaks 1", with("eaglet-link", "99")),
        ("version , this", without("eaglet-link")),
        ("cannot decode a hello", without("eaglet-hello")),
        ("cannot decode a hello", with("eaglet-hello", "{\"from\":1}")),
        ("exceeds 512", with("eaglet-hello", &"x".repeat(513))),
        ("whether there are checksums", with("eaglet-checked", "2")),
        ("the hello is for", {
            let to = Endpoint {
                generation: Generation(9),
                ..HERE
            };
            empty(opening(TOKEN, &Hello { to, ..hello(1) }))
        }),
    ];
    bounded(move || {
        let bound = bind(ListenerOptions::default());
        for (words, request) in requests {
            let mut raw = RawSender::connect(&bound);
            let answer = raw.say(request).expect("an answer");
            assert_eq!(answer.status(), StatusCode::FORBIDDEN, "{words}");
            let told = raw.runtime.block_on(answer.into_body().collect()).expect("words");
            let error = bound.closed().expect("refused").to_string();
            assert!(error.contains(words), "`{error}` instead of `{words}`");
            assert_eq!(told.to_bytes(), error.as_bytes());
        }
    });
}

/// L-2, L-3: what is not HTTP/2 at all.
#[test]
fn bytes_that_are_no_http2_are_put_out() {
    bounded(|| {
        let bound = bind(ListenerOptions::default());
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        let garbage = [&preface[..], &[0xaa; 200]].concat();
        let huge_frame = [&preface[..], &[0xff, 0xff, 0xff, 4, 0, 0, 0, 0, 0], &[0; 64]].concat();
        for bytes in [
            &[0x55; 480][..],
            b"POST /hello HTTP/1.1\r\nhost: link\r\n\r\n",
            &garbage,
            &huge_frame,
        ] {
            let mut socket = TcpStream::connect(bound.network().address).expect("it listens");
            socket.write_all(bytes).expect("it reads");
            let error = bound.closed();
            assert!(matches!(error, Some(LinkError::Frame { .. })), "{error:?}");
            // Closed or reset; either way nothing more comes.
            let _ = socket.read_to_end(&mut Vec::new());
        }
        drop(TcpStream::connect(bound.network().address).expect("it listens"));
        let error = bound.closed();
        assert!(matches!(error, Some(LinkError::PeerLost { .. })), "{error:?}");
    });
}

/// L-3 in the other direction.
#[test]
fn a_receiver_that_breaks_the_protocol_ends_the_link() {
    type Answers = fn(&Request<Incoming>) -> (StatusCode, &'static str, &'static str);
    /// Accepts one connection and answers as it is told; bodies are not read.
    fn serve(answers: Answers) -> Network {
        let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).expect("some port is free");
        let address = listener.local_addr().expect("it has one");
        std::thread::spawn(move || {
            let (socket, _) = listener.accept().expect("a sender comes");
            socket.set_nonblocking(true).expect("a socket");
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("threads are left");
            runtime.block_on(async {
                let socket = tokio::net::TcpStream::from_std(socket).expect("a socket");
                let service = service_fn(move |request: Request<Incoming>| async move {
                    let (status, version, words) = answers(&request);
                    // A body that is not read keeps its stream open for as long as it lives.
                    std::mem::forget(request);
                    let mut answer = Response::new(Full::new(Bytes::from_static(words.as_bytes())).boxed());
                    if words == "never" {
                        *answer.body_mut() = http_body_util::StreamBody::new(tokio_stream::pending()).boxed();
                    }
                    *answer.status_mut() = status;
                    let version = ::http::HeaderValue::from_static(version);
                    answer.headers_mut().insert("eaglet-link", version);
                    Ok::<_, Infallible>(answer)
                });
                // The sender goes away when it has seen enough.
                let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(socket), service)
                    .await;
            });
        });
        Network {
            address,
            token: TOKEN.to_owned(),
        }
    }
    bounded(|| {
        let refused: [(&str, Answers); 3] = [
            ("another version", |_| (StatusCode::OK, "2", "never")),
            ("404", |_| (StatusCode::NOT_FOUND, "1", "")),
            ("no room", |_| (StatusCode::FORBIDDEN, "1", "no room")),
        ];
        for (words, answers) in refused {
            let error = BulkSender::connect_remote(&serve(answers), hello(1), small_ring(), |_| {}).err();
            let error = error.expect("refused").to_string();
            assert!(error.contains(words), "`{error}` instead of `{words}`");
        }
        let ended: [(&str, Answers); 4] = [
            ("with nothing under way", |_| (StatusCode::OK, "1", "")),
            ("as it pleases", |_| (StatusCode::OK, "1", "as it pleases")),
            ("answered with 404", |request| match request.uri().path() {
                "/hello" => (StatusCode::OK, "1", "never"),
                _ => (StatusCode::NOT_FOUND, "1", ""),
            }),
            ("answered before it was sent", |request| {
                match request.uri().path() {
                    "/hello" => (StatusCode::OK, "1", "never"),
                    _ => (StatusCode::OK, "1", ""),
                }
            }),
        ];
        for (words, answers) in ended {
            let (told, ends) = crossbeam_channel::unbounded();
            let on_end = move |error: &LinkError| {
                let _ = told.send(error.to_string());
            };
            let sender = BulkSender::connect_remote(&serve(answers), hello(1), small_ring(), on_end)
                .expect("it is welcome");
            if words.starts_with("answered") {
                // More than any window holds.
                sender.send(state(&[64 << 20], 1), LIMIT).expect("room");
            }
            let error = ends.recv_timeout(LIMIT).expect("the link ends");
            assert!(error.contains(words), "`{error}` instead of `{words}`");
        }
    });
}
