//! The sending end: a task that carries the messages of an outbox into POSTs.

use std::collections::VecDeque;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper::rt::Executor as _;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::io::Errno;
use tokio::net::TcpStream;
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use super::body::RequestBody;
use super::workers::{Tasks, Workers, is_worker};
use super::{
    ANSWER_WINDOW_BYTES, CHECKED_HEADER, FRAME_BYTES, GOODBYE_PATH, HEADER_BYTES_HEADER, HELLO_HEADER,
    HELLO_PATH, LAST_WORDS, MAX_HEADERS_BYTES, MAX_UNDER_WAY, MESSAGE_BYTES_HEADER, MESSAGE_PATH, Network,
    PING_INTERVAL, PING_TIMEOUT, SEQUENCE_HEADER, VERSION, VERSION_HEADER, meaning, system,
};
use crate::link::error::{LinkError, REASON_LIMIT_BYTES};
use crate::link::hello::Hello;
use crate::link::message::Encoded;
use crate::link::outbox::Outbox;
use crate::link::sender::SenderOptions;

/// What one end waits beyond the time that the other has: for its own threads.
const SLACK: Duration = Duration::from_secs(1);

/// Bytes that wait behind the socket: the next frame is there when one has gone.
const SEND_BUFFER_BYTES: usize = 2 * FRAME_BYTES as usize;

type Answer = hyper::Result<Response<Incoming>>;

/// The threads on which the task of a link runs.
pub(in crate::link) struct Link {
    #[expect(dead_code, reason = "the threads live as long as their links")]
    workers: Arc<Workers>,
}

impl Link {
    /// Waits for the task, which was told to end.
    pub(in crate::link) fn join(&mut self, outbox: &Outbox) {
        if !is_worker() {
            outbox.wait_for_end(2 * LAST_WORDS + SLACK);
        }
    }
}

/// Says hello and starts the task of a link.
pub(in crate::link) fn connect(
    network: &Network,
    hello: &Hello,
    options: &SenderOptions,
    on_end: impl FnOnce(&LinkError) + Send + 'static,
) -> Result<(Arc<Outbox>, Link), LinkError> {
    let opening = opening(network, hello, options)?;
    let workers = Workers::get()?;
    let work = Arc::new(Notify::new());
    let wake = Arc::clone(&work);
    let outbox = Outbox::new(
        options.queue_messages,
        options.queue_bytes,
        Box::new(move || wake.notify_one()),
    );
    let ended = Ended(Arc::clone(&outbox));
    let (address, options) = (network.address, *options);
    let time_limit = Duration::from_millis(options.handshake_timeout_ms.max(1));
    let silent = LinkError::Silent {
        timeout_ms: options.handshake_timeout_ms,
    };
    let (tell, opened) = mpsc::sync_channel(1);
    let late = silent.clone();
    let task = async move {
        let conversation = match timeout(time_limit, Conversation::open(address, opening)).await {
            Ok(Ok(conversation)) => conversation,
            Ok(Err(error)) => return drop(tell.send(Err(error))),
            Err(_) => return drop(tell.send(Err(late))),
        };
        if tell.send(Ok(())).is_err() {
            return;
        }
        let error = Writer::run(&ended.0, &work, conversation, &options).await;
        ended.0.end(&error);
        if error != LinkError::Closed {
            on_end(&error);
        }
    };
    workers.spawn(task);
    match opened.recv_timeout(time_limit + SLACK) {
        Ok(Ok(())) => Ok((outbox, Link { workers })),
        Ok(Err(error)) => Err(error),
        // The task finds nobody to tell and ends.
        Err(_) => Err(silent),
    }
}

/// However the task of a link ends, its callers hear of it.
struct Ended(Arc<Outbox>);

impl Drop for Ended {
    fn drop(&mut self) {
        // Counts only if there was no reason before.
        self.0.end(&LinkError::Closed);
    }
}

fn post(path: &'static str) -> http::request::Builder {
    // The authority is not used: the address of the connection says where it goes.
    Request::post(format!("http://link{path}"))
}

fn no_request(error: http::Error) -> LinkError {
    LinkError::frame(format!("a request cannot be made: {error}"))
}

fn opening(
    network: &Network,
    hello: &Hello,
    options: &SenderOptions,
) -> Result<Request<RequestBody>, LinkError> {
    let told = serde_json::to_string(hello).map_err(|error| LinkError::Header {
        reason: error.to_string(),
    })?;
    post(HELLO_PATH)
        .header(http::header::AUTHORIZATION, network.authorization()?)
        .header(VERSION_HEADER, VERSION)
        .header(HELLO_HEADER, told)
        .header(CHECKED_HEADER, HeaderValue::from(u16::from(options.checksum)))
        .body(RequestBody::default())
        .map_err(no_request)
}

/// A connection whose hello was accepted.
struct Conversation {
    requests: SendRequest<RequestBody>,
    /// The answer to the hello, which lasts as long as the link.
    welcome: Incoming,
    connection: Driver,
}

/// What drives a connection.
struct Driver {
    tasks: Tasks,
    /// How it ended.
    end: oneshot::Receiver<hyper::Result<()>>,
}

impl Drop for Driver {
    fn drop(&mut self) {
        // They hold each other.
        self.tasks.cancel();
    }
}

impl Conversation {
    async fn open(address: SocketAddr, opening: Request<RequestBody>) -> Result<Self, LinkError> {
        let socket =
            TcpStream::connect(address)
                .await
                .map_err(|error| match Errno::from_io_error(&error) {
                    Some(Errno::CONNREFUSED) => LinkError::NoListener {
                        name: address.to_string(),
                    },
                    _ => system("connect to the address of a link")(error),
                })?;
        socket
            .set_nodelay(true)
            .map_err(system("set an option of a socket"))?;
        let lost = |error: &hyper::Error| meaning(error, "before it answered the hello");
        let (tell, end) = oneshot::channel();
        let mut connection = Driver {
            tasks: Tasks::default(),
            end,
        };
        let (mut requests, driver) = Builder::new(connection.tasks.clone())
            .timer(TokioTimer::new())
            .initial_stream_window_size(ANSWER_WINDOW_BYTES)
            .initial_connection_window_size(ANSWER_WINDOW_BYTES)
            .max_header_list_size(MAX_HEADERS_BYTES)
            .max_send_buf_size(SEND_BUFFER_BYTES)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true)
            .handshake(TokioIo::new(socket))
            .await
            .map_err(|error| lost(&error))?;
        connection
            .tasks
            .execute(async move { drop(tell.send(driver.await)) });
        let answer = match requests.send_request(opening).await {
            Ok(answer) => answer,
            // The connection knows more than the request.
            Err(error) => {
                return Err(match timeout(LAST_WORDS, &mut connection.end).await {
                    Ok(Ok(Err(error))) => lost(&error),
                    _ => lost(&error),
                });
            }
        };
        let version = answer.headers().get(VERSION_HEADER);
        let speaks_it = version.is_some_and(|version| version == VERSION);
        match answer.status() {
            StatusCode::OK if speaks_it => Ok(Self {
                requests,
                welcome: answer.into_body(),
                connection,
            }),
            StatusCode::OK => Err(LinkError::frame(
                "the welcome is of another version; start every rank from the same binary",
            )),
            status => {
                let reason = last_words(answer.into_body()).await;
                Err(LinkError::Refused {
                    reason: reason.unwrap_or_else(|| status.to_string()),
                })
            }
        }
    }
}

/// What the receiver says when it ends a link, if it says anything; cut, since it is only for people.
async fn last_words(mut body: Incoming) -> Option<String> {
    let mut words = Vec::new();
    while words.len() < REASON_LIMIT_BYTES {
        match body.frame().await {
            Some(Ok(frame)) => words.extend_from_slice(frame.data_ref()?),
            Some(Err(_)) => return None,
            None => break,
        }
    }
    words.truncate(REASON_LIMIT_BYTES);
    (!words.is_empty()).then(|| String::from_utf8_lossy(&words).into_owned())
}

/// The task's own.
struct Writer<'a> {
    outbox: &'a Outbox,
    requests: SendRequest<RequestBody>,
    checked: bool,
    /// For drills: the piece, counted from the next, in which a bit flips.
    corrupt: Option<u64>,
    /// Messages that were sent.
    sequence: u64,
    /// Those that were not answered; answers come in order.
    under_way: VecDeque<UnderWay>,
    /// Told when the connection has all of the last one.
    handing_over: Option<oneshot::Receiver<()>>,
}

struct UnderWay {
    message_bytes: u64,
    answer: Pin<Box<dyn Future<Output = Answer> + Send>>,
}

impl Writer<'_> {
    /// Sends messages until the link ends; says why it did. Then nothing is left of the connection.
    async fn run(
        outbox: &Outbox,
        work: &Notify,
        conversation: Conversation,
        options: &SenderOptions,
    ) -> LinkError {
        let Conversation {
            requests,
            welcome,
            mut connection,
        } = conversation;
        let mut writer = Writer {
            outbox,
            requests,
            checked: options.checksum,
            corrupt: options.corrupt_nth,
            sequence: 0,
            under_way: VecDeque::new(),
            handing_over: None,
        };
        let end = last_words(welcome);
        tokio::pin!(end);
        let words = loop {
            if outbox.is_closing() {
                // The receiver may know that nothing is missing. It need not hear it.
                let _ = timeout(LAST_WORDS, writer.say_goodbye()).await;
                break Err(LinkError::Closed);
            }
            if let Some(message) = writer.next() {
                match writer.post(message) {
                    Ok(()) => continue,
                    Err(error) => break Err(error),
                }
            }
            tokio::select! {
                biased;
                words = &mut end => break Ok(words),
                answer = first(&mut writer.under_way) => if let Err(failure) = writer.take_answer(answer) {
                    // The receiver says why.
                    break match timeout(LAST_WORDS, &mut end).await {
                        Ok(words @ Some(_)) => Ok(words),
                        _ => failure.map_or(Ok(None), Err),
                    };
                },
                () = handed_over(&mut writer.handing_over) => writer.handing_over = None,
                () = work.notified() => {}
            }
        };
        let place = if writer.under_way.is_empty() {
            "with nothing under way"
        } else {
            "before it took everything"
        };
        let error = match words {
            Err(error) => error,
            Ok(Some(reason)) => LinkError::Refused { reason },
            Ok(None) => match timeout(LAST_WORDS, &mut connection.end).await {
                Ok(Ok(Err(error))) => meaning(&error, place),
                _ => LinkError::PeerLost { place },
            },
        };
        drop(writer);
        connection.tasks.end().await;
        error
    }

    /// The next message, if the connection is ready for it.
    fn next(&self) -> Option<Encoded> {
        let ready = self.under_way.len() < MAX_UNDER_WAY && self.handing_over.is_none();
        ready.then(|| self.outbox.next()).flatten()
    }

    fn post(&mut self, message: Encoded) -> Result<(), LinkError> {
        let (message_bytes, header_bytes) = (message.message_bytes, message.header.len());
        let (body, handing_over) = RequestBody::new(message, self.checked, self.corrupt);
        self.corrupt = self.corrupt.and_then(|nth| nth.checked_sub(body.pieces()));
        let request = post(MESSAGE_PATH)
            .header(SEQUENCE_HEADER, self.sequence)
            .header(HEADER_BYTES_HEADER, header_bytes)
            .header(MESSAGE_BYTES_HEADER, message_bytes)
            .body(body)
            .map_err(no_request)?;
        self.sequence += 1;
        self.handing_over = Some(handing_over);
        self.under_way.push_back(UnderWay {
            message_bytes,
            answer: Box::pin(self.requests.send_request(request)),
        });
        Ok(())
    }

    /// The first message under way was answered. Fails, perhaps without a reason of its own, if the link is at its end.
    fn take_answer(&mut self, answer: Answer) -> Result<(), Option<LinkError>> {
        let answer = answer.map_err(|error| {
            tracing::debug!(%error, "a message on a link was not answered");
            None
        })?;
        if answer.status() != StatusCode::OK {
            return Err(Some(LinkError::frame(format!(
                "a message was answered with {}",
                answer.status()
            ))));
        }
        if self.under_way.len() == 1
            && let Some(handing_over) = &mut self.handing_over
            && handing_over.try_recv() == Err(oneshot::error::TryRecvError::Empty)
        {
            return Err(Some(LinkError::frame(
                "a message was answered before it was sent",
            )));
        }
        if let Some(taken) = self.under_way.pop_front() {
            self.outbox.let_go(taken.message_bytes);
        }
        Ok(())
    }

    /// Lets what is under way arrive, and says that nothing follows.
    async fn say_goodbye(&mut self) -> Option<()> {
        while !self.under_way.is_empty() {
            let answer = first(&mut self.under_way).await;
            self.take_answer(answer).ok()?;
        }
        let request = post(GOODBYE_PATH)
            .header(SEQUENCE_HEADER, self.sequence)
            .body(RequestBody::default())
            .ok()?;
        self.requests.send_request(request).await.ok().map(drop)
    }
}

/// The answer to the first message under way; never if there is none.
async fn first(under_way: &mut VecDeque<UnderWay>) -> Answer {
    match under_way.front_mut() {
        Some(first) => first.answer.as_mut().await,
        None => std::future::pending().await,
    }
}

/// When the connection has all of the last message, or has dropped it; never if there is none.
async fn handed_over(handing_over: &mut Option<oneshot::Receiver<()>>) {
    match handing_over {
        // Dropped or not, the answer tells.
        Some(handing_over) => drop(handing_over.await),
        None => std::future::pending().await,
    }
}
