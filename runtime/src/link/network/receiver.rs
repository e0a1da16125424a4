//! The receiving end: accepts connections, checks who they are, and hands what they post to their [`Intake`].

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc as std_mpsc};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http2::Builder;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustix::io::Errno;
use subtle::ConstantTimeEq;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::body::Words;
use super::intake::{Arrived, Intake};
use super::workers::{Workers, is_worker};
use super::{
    CHECKED_HEADER, CONNECTION_WINDOW_BYTES, FRAME_BYTES, GOODBYE_PATH, HELLO_HEADER, HELLO_LIMIT_BYTES,
    HELLO_PATH, LAST_WORDS, MAX_HEADERS_BYTES, MAX_STREAMS, MESSAGE_PATH, Network, PING_INTERVAL,
    PING_TIMEOUT, STREAM_WINDOW_BYTES, VERSION, VERSION_HEADER, meaning, system,
};
use crate::link::error::LinkError;
use crate::link::hello::Hello;
use crate::link::listener::{Hub, Place};

/// Connections that have not said hello. Beyond them nobody is listened to: who does not know the token can take no
/// more than these places, each for as long as a hello may take.
const MAX_STRANGERS: usize = 64;

/// How long the acceptor rests when the process has no descriptors left; the connection stays in the backlog.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(20);

/// What the close of a listener waits beyond the time that its peers have.
const SLACK: Duration = Duration::from_secs(1);

/// The task that accepts, and those of the connections.
pub(in crate::link) struct Acceptor {
    address: SocketAddr,
    closing: watch::Sender<bool>,
    /// Disconnected when no task is left.
    left: std_mpsc::Receiver<Infallible>,
    #[expect(dead_code, reason = "the threads live as long as the listener")]
    workers: Arc<Workers>,
}

/// Listens at an address.
pub(in crate::link) fn listen(network: &Network, hub: &Arc<Hub>) -> Result<Acceptor, LinkError> {
    let authorization = network.authorization()?;
    let listener =
        std::net::TcpListener::bind(network.address).map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::ADDRINUSE) => LinkError::NameTaken {
                name: network.address.to_string(),
            },
            _ => system("listen at the address of a link")(error),
        })?;
    listener
        .set_nonblocking(true)
        .map_err(system("make a socket non-blocking"))?;
    let address = listener.local_addr().map_err(system("ask for an address"))?;
    let workers = Workers::get()?;
    let listener = workers
        .within(|| TcpListener::from_std(listener))
        .map_err(system("wait for a socket"))?;
    let (closing, told) = watch::channel(false);
    let (alive, left) = std_mpsc::channel();
    let gate = Gate {
        hub: Arc::clone(hub),
        authorization,
        closing: told,
        alive,
    };
    workers.spawn(gate.accept(listener));
    Ok(Acceptor {
        address,
        closing,
        left,
        workers,
    })
}

impl Acceptor {
    pub(in crate::link) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for all connections. The hub was closed before, so that nobody comes any more.
    pub(in crate::link) fn stop(&mut self) {
        self.closing.send_replace(true);
        if !is_worker() {
            // Nothing is ever sent; it ends when the last task does.
            let _ = self.left.recv_timeout(2 * LAST_WORDS + SLACK);
        }
    }
}

/// What every connection of a listener needs.
#[derive(Clone)]
struct Gate {
    hub: Arc<Hub>,
    authorization: HeaderValue,
    closing: watch::Receiver<bool>,
    #[expect(dead_code, reason = "its end tells that the task has ended")]
    alive: std_mpsc::Sender<Infallible>,
}

impl Gate {
    async fn accept(mut self, listener: TcpListener) {
        let strangers = Arc::new(Semaphore::new(MAX_STRANGERS));
        loop {
            let accepted = tokio::select! {
                biased;
                _ = self.closing.wait_for(|closing| *closing) => return,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((socket, _)) => match Arc::clone(&strangers).try_acquire_owned() {
                    Ok(stranger) => drop(tokio::spawn(self.clone().serve(socket, stranger))),
                    Err(_) => {
                        drop(socket);
                        let limit = MAX_STRANGERS;
                        self.hub
                            .report_end(None, Err(LinkError::TooManyConnections { limit }));
                    }
                },
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a link; trying again");
                    sleep(EXHAUSTED_PAUSE).await;
                }
            }
        }
    }

    /// The task of one connection.
    async fn serve(mut self, socket: TcpStream, stranger: OwnedSemaphorePermit) {
        // A failure costs latency only.
        let _ = socket.set_nodelay(true);
        let session = Arc::new(Session {
            hub: Arc::clone(&self.hub),
            authorization: self.authorization.clone(),
            accepted: Mutex::default(),
            peer: OnceLock::new(),
            course: Arc::new(Course {
                end: Mutex::default(),
                progress: watch::Sender::new(Progress::Silent),
            }),
        });
        let course = &session.course;
        {
            let service = service_fn(|request| answer(session.take(request)));
            let mut connection = pin!(
                Builder::new(TokioExecutor::new())
                    .timer(TokioTimer::new())
                    .initial_stream_window_size(STREAM_WINDOW_BYTES)
                    .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
                    .max_frame_size(FRAME_BYTES)
                    .max_concurrent_streams(MAX_STREAMS)
                    .max_header_list_size(MAX_HEADERS_BYTES)
                    .keep_alive_interval(PING_INTERVAL)
                    .keep_alive_timeout(PING_TIMEOUT)
                    .auto_date_header(false)
                    .serve_connection(TokioIo::new(socket), service)
            );
            let timeout_ms = self.hub.options.handshake_timeout_ms;
            let decided = tokio::select! {
                biased;
                () = course.reaches(Progress::Greeted) => None,
                end = &mut connection => Some(end),
                () = sleep(Duration::from_millis(timeout_ms)) => {
                    course.finish(Err(LinkError::Silent { timeout_ms }));
                    None
                }
                _ = self.closing.wait_for(|closing| *closing) => {
                    course.finish(Err(LinkError::Closed));
                    None
                }
            };
            drop(stranger);
            let decided = match decided {
                None => tokio::select! {
                    biased;
                    () = course.reaches(Progress::Ended) => None,
                    end = &mut connection => Some(end),
                },
                decided => decided,
            };
            match decided {
                // The peer is told, and leaves.
                None => drop(timeout(LAST_WORDS, connection).await),
                Some(Ok(())) => course.finish(Err(LinkError::PeerLost {
                    place: "without a goodbye",
                })),
                Some(Err(error)) => course.finish(Err(meaning(&error, "without a goodbye"))),
            }
        }
        session.leave().await;
    }
}

/// What is said on one connection.
struct Session {
    hub: Arc<Hub>,
    authorization: HeaderValue,
    /// What the sender said.
    peer: OnceLock<Hello>,
    accepted: Mutex<Option<Accepted>>,
    course: Arc<Course>,
}

/// What a connection has from its hello on.
struct Accepted {
    place: Place,
    arrivals: mpsc::Sender<Arrived>,
    intake: JoinHandle<()>,
}

/// How a conversation goes, for whoever ends it.
struct Course {
    end: Mutex<End>,
    progress: watch::Sender<Progress>,
}

#[derive(Default)]
struct End {
    /// The first that ends it counts.
    result: Option<Result<(), LinkError>>,
    /// What the body of the answer to the hello waits for.
    last_words: Option<oneshot::Sender<Bytes>>,
}

/// How far a conversation is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Progress {
    /// Nothing was accepted yet.
    Silent,
    /// A hello was.
    Greeted,
    /// It is at its end.
    Ended,
}

/// What is answered to a request.
enum Reply {
    /// The hello is accepted; the words come at the end.
    Welcome(oneshot::Receiver<Bytes>),
    /// When a message or all messages were delivered.
    Delivered(oneshot::Receiver<()>),
}

impl Course {
    fn end(&self) -> MutexGuard<'_, End> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn reaches(&self, progress: Progress) {
        // The sender is this one's own.
        let _ = self
            .progress
            .subscribe()
            .wait_for(|reached| *reached >= progress)
            .await;
    }

    /// Begins with the messages, if the conversation was not ended meanwhile; the words come at its end.
    fn begin(&self) -> Result<oneshot::Receiver<Bytes>, LinkError> {
        let mut end = self.end();
        if let Some(result) = &end.result {
            return Err(result.clone().err().unwrap_or(LinkError::Closed));
        }
        let (last_words, words) = oneshot::channel();
        end.last_words = Some(last_words);
        // With the lock, so that it does not undo an end.
        self.progress.send_replace(Progress::Greeted);
        Ok(words)
    }

    /// Ends the conversation and tells the peer why. Never waits.
    fn finish(&self, result: Result<(), LinkError>) {
        let mut end = self.end();
        if end.result.is_some() {
            return;
        }
        if let (Err(error), Some(words)) = (&result, end.last_words.take()) {
            // The peer may be gone.
            let _ = words.send(error.told().into());
        }
        end.result = Some(result);
        self.progress.send_replace(Progress::Ended);
    }
}

impl Session {
    fn accepted(&self) -> MutexGuard<'_, Option<Accepted>> {
        self.accepted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a request as it comes in, in the order of the connection: nothing of its body is read before its place is
    /// known. An error ends the conversation.
    fn take(&self, request: Request<Incoming>) -> Result<Reply, LinkError> {
        let reply = self.understand(request);
        if let Err(error) = &reply {
            self.course.finish(Err(error.clone()));
        }
        reply
    }

    fn understand(&self, request: Request<Incoming>) -> Result<Reply, LinkError> {
        let wrong =
            |what: &str| LinkError::frame(format!("{what} {} {}", request.method(), request.uri().path()));
        let ended = self.course.end().result.clone();
        match ended {
            Some(Err(error)) => return Err(error),
            Some(Ok(())) => return Err(wrong("after the goodbye came")),
            None => {}
        }
        let accepted = self.accepted();
        match &*accepted {
            None => {
                drop(accepted);
                self.check_token(request.headers())?;
                match (request.method(), request.uri().path()) {
                    (&Method::POST, HELLO_PATH) => self.greet(request.headers()),
                    _ => Err(wrong("where a hello was expected came")),
                }
            }
            Some(accepted) => {
                let goodbye = match (request.method(), request.uri().path()) {
                    (&Method::POST, MESSAGE_PATH) => false,
                    (&Method::POST, GOODBYE_PATH) => true,
                    _ => return Err(wrong("where a message was expected came")),
                };
                let (delivered, told) = oneshot::channel();
                accepted
                    .arrivals
                    .try_send(Arrived {
                        goodbye,
                        request,
                        delivered,
                    })
                    .map_err(|_| LinkError::frame("more messages at a time than are allowed"))?;
                Ok(Reply::Delivered(told))
            }
        }
    }

    fn check_token(&self, headers: &HeaderMap) -> Result<(), LinkError> {
        let said = headers
            .get(http::header::AUTHORIZATION)
            .map_or(&[][..], HeaderValue::as_bytes);
        // In the same time wherever they differ.
        let same = bool::from(said.ct_eq(self.authorization.as_bytes()));
        same.then_some(()).ok_or(LinkError::Token)
    }

    /// Accepts a hello or refuses it.
    fn greet(&self, headers: &HeaderMap) -> Result<Reply, LinkError> {
        let field = |name: &str| headers.get(name).map_or(&[][..], HeaderValue::as_bytes);
        let version = field(VERSION_HEADER);
        if version != VERSION.as_bytes() {
            return Err(LinkError::frame(format!(
                "version {}, this binary speaks {VERSION}; start every rank from the same binary",
                version.escape_ascii()
            )));
        }
        let told = field(HELLO_HEADER);
        if told.len() > HELLO_LIMIT_BYTES {
            return Err(LinkError::frame(format!(
                "a hello of {} bytes exceeds {HELLO_LIMIT_BYTES}",
                told.len()
            )));
        }
        let hello: Hello = serde_json::from_slice(told).map_err(|error| LinkError::Header {
            reason: format!("cannot decode a hello: {error}"),
        })?;
        let checked = match field(CHECKED_HEADER) {
            b"0" => false,
            b"1" => true,
            _ => {
                return Err(LinkError::frame(
                    "a hello that does not say whether there are checksums",
                ));
            }
        };
        // Set once: there is one hello.
        let _ = self.peer.set(hello);
        let course = Arc::clone(&self.course);
        let place = self
            .hub
            .enter(Box::new(move |error| course.finish(Err(error.clone()))))?;
        self.hub.check_receiver(&hello)?;
        self.hub.fence(&place, hello.from)?;
        let words = self.course.begin()?;
        self.hub.opened(hello);
        let (arrivals, arriving) = mpsc::channel(MAX_STREAMS as usize);
        let (course, intake) = (
            Arc::clone(&self.course),
            Intake::new(&self.hub, hello.from, checked),
        );
        let intake = tokio::spawn(async move { course.finish(intake.run(arriving).await) });
        *self.accepted() = Some(Accepted {
            place,
            arrivals,
            intake,
        });
        Ok(Reply::Welcome(words))
    }

    /// Gives everything free and tells how the connection ended, which is gone by now.
    async fn leave(&self) {
        let accepted = self.accepted().take();
        let ended = self.course.end().result.clone();
        let mut result = ended.unwrap_or(Err(LinkError::Closed));
        if let Some(Accepted { place, intake, .. }) = accepted {
            intake.abort();
            // Cancelled or done: either way it delivers nothing more.
            let _ = intake.await;
            result = place.leave(result);
        }
        self.hub.report_end(self.peer.get().copied(), result);
    }
}

/// Turns a reply into the answer of HTTP.
fn answer(
    reply: Result<Reply, LinkError>,
) -> impl Future<Output = Result<Response<Words>, Infallible>> + Send + 'static {
    async move {
        let (status, words) = match reply {
            Ok(Reply::Welcome(words)) => (StatusCode::OK, Words::later(words)),
            Ok(Reply::Delivered(told)) => match told.await {
                Ok(()) => (StatusCode::OK, Words::default()),
                // The answer to the hello says why.
                Err(_) => (StatusCode::GONE, Words::default()),
            },
            Err(error) => (StatusCode::FORBIDDEN, Words::now(error.told())),
        };
        let mut answer = Response::new(words);
        *answer.status_mut() = status;
        answer
            .headers_mut()
            .insert(VERSION_HEADER, HeaderValue::from_static(VERSION));
        Ok(answer)
    }
}
