//! Tensors through TCP, over the loopback device: a plain stream, and one POST per tensor, as they would go to another
//! host.
//!
//! Links between hosts are not built yet; this measures what they would be built on.

use std::convert::Infallible;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::mpsc;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde::Serialize;
use tokio::runtime::Runtime;

use super::Plan;
use crate::bench::facts::Spread;

/// Receive window of a stream and of its connection: enough that the sender never waits for an update of it.
const WINDOW_BYTES: u32 = 64 << 20;
/// Largest piece of a body: small enough to stay in the caches between two copies.
const FRAME_BYTES: u32 = 1 << 20;

/// Rates at one size of tensors, in GB/s.
#[derive(Debug, Serialize)]
pub(super) struct BetweenHosts {
    pub(super) bytes: usize,
    pub(super) tcp_gb_s: Spread,
    pub(super) http2_gb_s: Spread,
    pub(super) http1_gb_s: Spread,
}

pub(super) fn measure(bytes: usize, plan: &Plan<'_>) -> Result<BetweenHosts> {
    let source: Vec<u8> = (0..bytes).map(|i| ((i * 31) >> 7) as u8).collect();
    let tensor = Bytes::from(source);
    let mut stream = Stream::open(bytes)?;
    let mut http2 = Posts::open(Version::Http2)?;
    let mut http1 = Posts::open(Version::Http1)?;
    let [tcp_gb_s, http2_gb_s, http1_gb_s] = plan.rates(
        bytes,
        &mut [
            &mut |count| stream.carry(count, &tensor),
            &mut |count| http2.carry(count, &tensor),
            &mut |count| http1.carry(count, &tensor),
        ],
    )?;
    Ok(BetweenHosts {
        bytes,
        tcp_gb_s,
        http2_gb_s,
        http1_gb_s,
    })
}

/// A plain TCP stream, and a thread that reads it.
struct Stream {
    socket: TcpStream,
    arrived: mpsc::Receiver<()>,
}

impl Stream {
    fn open(bytes: usize) -> Result<Self> {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen on the loopback device")?;
        let socket = TcpStream::connect(listener.local_addr()?).context("cannot connect to this machine")?;
        let (mut reader, _) = listener.accept().context("cannot accept a connection")?;
        let (tell, arrived) = mpsc::channel();
        // Ends with its stream.
        std::thread::spawn(move || {
            let mut tensor = vec![0; bytes];
            while reader.read_exact(&mut tensor).is_ok() && tell.send(()).is_ok() {}
        });
        Ok(Self { socket, arrived })
    }

    fn carry(&mut self, count: usize, tensor: &[u8]) -> Result<()> {
        for _ in 0..count {
            self.socket
                .write_all(tensor)
                .context("cannot write to a stream")?;
        }
        for _ in 0..count {
            self.arrived.recv().context("the reader of the stream is gone")?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
enum Version {
    Http1,
    Http2,
}

enum Sender {
    Http1(hyper::client::conn::http1::SendRequest<Full<Bytes>>),
    Http2(hyper::client::conn::http2::SendRequest<Full<Bytes>>),
}

/// One connection that carries a POST per tensor, each end on a thread of its own.
struct Posts {
    sender: Sender,
    client: Runtime,
    _server: Runtime,
}

impl Posts {
    fn open(version: Version) -> Result<Self> {
        let runtime = || {
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .context("cannot start a thread")
        };
        let (client, server) = (runtime()?, runtime()?);
        let listener = server
            .block_on(tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
            .context("cannot listen on the loopback device")?;
        let address = listener.local_addr()?;
        server.spawn(async move {
            let Ok((socket, _)) = listener.accept().await else {
                return;
            };
            // A failure costs latency only.
            let _ = socket.set_nodelay(true);
            // A tensor must lie in one piece; its buffer is used again.
            let buffer = std::sync::Arc::new(tokio::sync::Mutex::new(Vec::new()));
            let service = service_fn(move |request| take(request, std::sync::Arc::clone(&buffer)));
            let socket = TokioIo::new(socket);
            // The client sees that the connection has failed.
            match version {
                Version::Http1 => {
                    let server = hyper::server::conn::http1::Builder::new();
                    let _ = server.serve_connection(socket, service).await;
                }
                Version::Http2 => {
                    let mut server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    server
                        .initial_stream_window_size(WINDOW_BYTES)
                        .initial_connection_window_size(WINDOW_BYTES)
                        .max_frame_size(FRAME_BYTES);
                    let _ = server.serve_connection(socket, service).await;
                }
            }
        });
        let sender = client.block_on(async {
            let socket = tokio::net::TcpStream::connect(address).await?;
            socket.set_nodelay(true)?;
            let socket = TokioIo::new(socket);
            anyhow::Ok(match version {
                Version::Http1 => {
                    let (sender, connection) = hyper::client::conn::http1::handshake(socket).await?;
                    tokio::spawn(connection);
                    Sender::Http1(sender)
                }
                Version::Http2 => {
                    let mut client = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
                    client
                        .initial_stream_window_size(WINDOW_BYTES)
                        .initial_connection_window_size(WINDOW_BYTES)
                        .max_frame_size(FRAME_BYTES)
                        .max_send_buf_size(WINDOW_BYTES as usize);
                    let (sender, connection) = client.handshake(socket).await?;
                    tokio::spawn(connection);
                    Sender::Http2(sender)
                }
            })
        })?;
        Ok(Self {
            sender,
            client,
            _server: server,
        })
    }

    fn carry(&mut self, count: usize, tensor: &Bytes) -> Result<()> {
        let Self { sender, client, .. } = self;
        client.block_on(async {
            for _ in 0..count {
                let request = Request::post("http://localhost/tensor").body(Full::new(tensor.clone()))?;
                let answer = match sender {
                    Sender::Http1(sender) => {
                        sender.ready().await?;
                        sender.send_request(request).await?
                    }
                    Sender::Http2(sender) => {
                        sender.ready().await?;
                        sender.send_request(request).await?
                    }
                };
                let length = answer
                    .headers()
                    .get("tensor-bytes")
                    .and_then(|length| length.to_str().ok());
                ensure!(
                    length == Some(tensor.len().to_string().as_str()),
                    "a tensor arrived with another length than was sent"
                );
            }
            Ok(())
        })
    }
}

/// Puts a tensor together; answers with its length.
async fn take(
    request: Request<Incoming>,
    buffer: std::sync::Arc<tokio::sync::Mutex<Vec<u8>>>,
) -> Result<Response<Empty<Bytes>>, Infallible> {
    let mut tensor = buffer.lock().await;
    tensor.clear();
    let mut body = request.into_body();
    while let Some(Ok(frame)) = body.frame().await {
        if let Some(data) = frame.data_ref() {
            tensor.extend_from_slice(data);
        }
    }
    let mut answer = Response::new(Empty::new());
    answer.headers_mut().insert("tensor-bytes", tensor.len().into());
    Ok(answer)
}
