//! tonic behind one module: how ranks and operators reach the coordinator and how the coordinator listens.
//!
//! A [`Dialed`] stream belongs to one incarnation: its channel is dropped with it, so nothing redials in silence.
//! Keepalive notices a stopped peer; beats (`Beat`, `BeatAck`) notice a wedged one.

use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status, Streaming};

use super::{
    Attach, CoordinatorCommand, HostCommand, HostEvent, Join, OperatorCall, OperatorReply, RankEvent,
};
use crate::wire::BODY_LIMIT_BYTES;

#[allow(missing_docs, unreachable_pub, clippy::all)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/eaglet.Control.rs"));
}

use generated::control_client::ControlClient;
use generated::control_server::{Control, ControlServer};

/// Messages that may wait in one direction of one stream; a peer that lets more pile up is lost.
pub const QUEUED_MESSAGES: usize = 4096;

/// A coordinator that does not accept a connection, or a rank, within this is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// An operator's request is answered within this: reading many lines of large files again takes its time.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait for the first message of a stream.
const FIRST_WORDS_TIMEOUT: Duration = Duration::from_secs(5);

const KEEPALIVE_INTERVAL: Duration = Duration::from_millis(500);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_millis(5000);

/// Why a control link could not be made.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}; set run.listen to a free port, or to port 0 for any")]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The coordinator cannot be reached.
    #[error("cannot reach the coordinator at {address}: {source}")]
    Connect {
        /// Its address.
        address: String,
        /// What tonic said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The coordinator does not want this host.
    #[error("the coordinator at {address} refuses this host: {}", refusal.reason)]
    Refused {
        /// Its address.
        address: String,
        /// Its words.
        refusal: Refusal,
    },
    /// Whoever listens there belongs to another launch.
    #[error("the coordinator at {address} belongs to another launch")]
    Stranger {
        /// Its address.
        address: String,
    },
    /// The link to the coordinator broke; the request may still be carried out.
    #[error(
        "the coordinator at {address} has not answered ({reason}); it may still do what was asked: see its log"
    )]
    Broken {
        /// Its address.
        address: String,
        /// What was seen.
        reason: String,
    },
    /// The coordinator has not answered; the request may still be carried out.
    #[error(
        "the coordinator at {address} has not answered within {seconds} s; it may still do what was asked: see its log"
    )]
    Late {
        /// Its address.
        address: String,
        /// How long it was waited for.
        seconds: u64,
    },
}

/// An end of a stream to the coordinator: a rank's, or a host's.
pub struct Dialed<E = RankEvent, C = CoordinatorCommand> {
    /// Towards the coordinator.
    pub events: mpsc::Sender<E>,
    /// From the coordinator; ends when the stream does.
    pub commands: Streaming<C>,
}

/// Connects to the coordinator and attaches.
///
/// # Errors
/// If the coordinator does not answer within five seconds or refuses.
pub async fn dial(address: &str, attach: Attach) -> Result<Dialed, TransportError> {
    let (events, words) = first_said(RankEvent::Attach(attach));
    let mut client = connect(address).await?;
    let commands = answered(address, client.attach(words))
        .await?
        .map_err(|status| unreached(address, status))?
        .into_inner();
    Ok(Dialed { events, commands })
}

/// The queue of a stream towards the coordinator, with the first message in it.
fn first_said<E: Send + 'static>(first: E) -> (mpsc::Sender<E>, ReceiverStream<E>) {
    let (events, queue) = mpsc::channel(QUEUED_MESSAGES);
    // The queue is empty and open, so this cannot fail.
    let _ = events.try_send(first);
    (events, ReceiverStream::new(queue))
}

/// What a coordinator answers, if it does so in time.
async fn answered<T>(
    address: &str,
    answer: impl Future<Output = Result<T, Status>>,
) -> Result<Result<T, Status>, TransportError> {
    let answer = tokio::time::timeout(CONNECT_TIMEOUT, answer).await;
    answer.map_err(|late| unreached(address, late))
}

fn unreached(address: &str, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> TransportError {
    TransportError::Connect {
        address: address.to_owned(),
        source: source.into(),
    }
}

/// Connects to the coordinator and joins it as a host.
///
/// # Errors
/// As [`dial`]; [`TransportError::Refused`] if it says why it does not want this host.
pub async fn join(address: &str, join: Join) -> Result<Dialed<HostEvent, HostCommand>, TransportError> {
    let (events, words) = first_said(HostEvent::Join(join));
    let mut client = connect(address).await?;
    let commands = answered(address, client.join(words))
        .await?
        .map_err(|status| match status.code() {
            code @ (Code::PermissionDenied | Code::FailedPrecondition) => TransportError::Refused {
                address: address.to_owned(),
                refusal: Refusal {
                    reason: status.message().to_owned(),
                    is_passing: code == Code::FailedPrecondition,
                },
            },
            _ => unreached(address, status),
        })?
        .into_inner();
    Ok(Dialed { events, commands })
}

/// Asks something of a coordinator on behalf of an operator.
///
/// # Errors
/// If the coordinator cannot be reached within five seconds, does not know the token, or does not answer in time.
pub async fn operate(address: &str, call: OperatorCall) -> Result<OperatorReply, TransportError> {
    let mut client = connect(address).await?;
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, client.operate(call))
        .await
        .map_err(|_| TransportError::Late {
            address: address.to_owned(),
            seconds: ANSWER_TIMEOUT.as_secs(),
        })?;
    answer
        .map(Response::into_inner)
        .map_err(|status| match status.code() {
            Code::Unauthenticated => TransportError::Stranger {
                address: address.to_owned(),
            },
            _ => unreached(address, status),
        })
}

async fn connect(address: &str) -> Result<ControlClient<Channel>, TransportError> {
    let channel = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| unreached(address, error))?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .connect()
        .await
        .map_err(|error| unreached(address, error))?;
    Ok(ControlClient::new(channel)
        .max_decoding_message_size(BODY_LIMIT_BYTES)
        .max_encoding_message_size(BODY_LIMIT_BYTES))
}

/// One attached rank, seen from the coordinator.
pub struct Accepted {
    /// What the rank said first.
    pub attach: Attach,
    /// What it says from now on.
    pub events: EventStream,
    /// Towards the rank; the stream to it ends when all senders are gone.
    pub commands: mpsc::Sender<CoordinatorCommand>,
}

/// A host that has joined, seen from the coordinator.
pub struct Joined {
    /// What the host said first.
    pub join: Join,
    /// What it says from now on.
    pub events: EventStream<HostEvent>,
    /// Towards the host; the stream to it ends when all senders are gone.
    pub commands: mpsc::Sender<HostCommand>,
}

/// Messages of a rank, or of a host.
pub struct EventStream<E = RankEvent>(Streaming<E>);

impl<E> EventStream<E> {
    /// The next message, or why there is none. `Ok(None)` only says that the stream is over.
    ///
    /// Cancel safety: safe; no message is lost.
    ///
    /// # Errors
    /// If the link broke or a message could not be decoded.
    pub async fn next(&mut self) -> Result<Option<E>, String> {
        self.0
            .message()
            .await
            .map_err(|status| first_line(status.message()))
    }
}

/// The part of a transport's message that a person needs.
fn first_line(message: &str) -> String {
    message
        .split(['\n', ':', ';'])
        .next()
        .unwrap_or_default()
        .trim()
        .to_owned()
}

/// Decides about attaching ranks: takes over the stream, or says why not.
pub trait Admit: Send + Sync + 'static {
    /// Admits a rank or refuses it with a reason.
    ///
    /// # Errors
    /// The reason of a refusal; it is told to the rank.
    fn admit(&self, accepted: Accepted) -> Result<(), String>;
}

/// Why a host is not taken in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Why, in words.
    pub reason: String,
    /// Whether the same host may be taken in a moment later.
    pub is_passing: bool,
}

impl Refusal {
    /// For as long as this launch lives.
    pub fn lasting(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            is_passing: false,
        }
    }

    /// For now.
    pub fn passing(reason: impl Into<String>) -> Self {
        Self {
            is_passing: true,
            ..Self::lasting(reason)
        }
    }
}

/// Decides about hosts that want to join: takes over the stream, or says why not.
pub trait Receive: Send + Sync + 'static {
    /// Takes a host in or refuses it with a reason.
    ///
    /// # Errors
    /// The reason of a refusal; it is told to the host.
    fn receive(&self, joined: Joined) -> Result<(), Refusal>;
}

/// Carries out what operators ask.
pub trait Operate: Send + Sync + 'static {
    /// Answers a call; `None` if its token is not the one of this launch.
    fn operate(&self, call: OperatorCall) -> impl Future<Output = Option<OperatorReply>> + Send;
}

struct Service<A, R, O> {
    admit: A,
    receive: R,
    operate: O,
}

/// What comes down a stream from the coordinator.
type Commands<C> = Pin<Box<dyn tokio_stream::Stream<Item = Result<C, Status>> + Send + 'static>>;

/// The commands of a queue as a stream.
fn outbound<C: Send + 'static>(queue: mpsc::Receiver<C>) -> Response<Commands<C>> {
    let stream = tokio_stream::StreamExt::map(ReceiverStream::new(queue), Ok);
    Response::new(Box::pin(stream))
}

/// The first message of a stream. Whoever says nothing is not waited for: nobody knows yet who it is.
async fn first_words<E>(events: &mut Streaming<E>) -> Result<Option<E>, Status> {
    tokio::time::timeout(FIRST_WORDS_TIMEOUT, events.message())
        .await
        .map_err(|_| Status::deadline_exceeded("the first message did not come in time"))?
}

#[tonic::async_trait]
impl<A: Admit, R: Receive, O: Operate> Control for Service<A, R, O> {
    type AttachStream = Commands<CoordinatorCommand>;
    type JoinStream = Commands<HostCommand>;

    async fn attach(
        &self,
        request: Request<Streaming<RankEvent>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut events = request.into_inner();
        let attach = match first_words(&mut events).await? {
            Some(RankEvent::Attach(attach)) => attach,
            _ => return Err(Status::invalid_argument("the first message must be attach")),
        };
        let (commands, queue) = mpsc::channel(QUEUED_MESSAGES);
        self.admit
            .admit(Accepted {
                attach,
                events: EventStream(events),
                commands,
            })
            .map_err(Status::permission_denied)?;
        Ok(outbound(queue))
    }

    async fn join(
        &self,
        request: Request<Streaming<HostEvent>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        let mut events = request.into_inner();
        let join = match first_words(&mut events).await? {
            Some(HostEvent::Join(join)) => join,
            _ => return Err(Status::invalid_argument("the first message must be join")),
        };
        let (commands, queue) = mpsc::channel(QUEUED_MESSAGES);
        self.receive
            .receive(Joined {
                join,
                events: EventStream(events),
                commands,
            })
            .map_err(|refusal| {
                let code = if refusal.is_passing {
                    Code::FailedPrecondition
                } else {
                    Code::PermissionDenied
                };
                Status::new(code, refusal.reason)
            })?;
        Ok(outbound(queue))
    }

    async fn operate(&self, request: Request<OperatorCall>) -> Result<Response<OperatorReply>, Status> {
        let answer = self.operate.operate(request.into_inner()).await;
        answer
            .map(Response::new)
            .ok_or_else(|| Status::unauthenticated("the call belongs to another launch"))
    }
}

/// Binds the control port.
///
/// # Errors
/// If the address is taken or not ours.
pub async fn bind(address: &str) -> Result<(TcpListener, SocketAddr), TransportError> {
    let wrong = |source| TransportError::Listen {
        address: address.to_owned(),
        source,
    };
    let listener = TcpListener::bind(address).await.map_err(wrong)?;
    let local = listener.local_addr().map_err(wrong)?;
    Ok((listener, local))
}

/// Serves the control port until the future is dropped.
///
/// # Errors
/// If accepting connections fails for good.
pub async fn serve(
    listener: TcpListener,
    admit: impl Admit,
    receive: impl Receive,
    operate: impl Operate,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let incoming = tokio_stream::StreamExt::map(TcpListenerStream::new(listener), |stream| {
        stream.inspect(|stream| {
            // A failure costs latency only.
            let _ = stream.set_nodelay(true);
        })
    });
    let service = ControlServer::new(Service {
        admit,
        receive,
        operate,
    })
    .max_decoding_message_size(BODY_LIMIT_BYTES)
    .max_encoding_message_size(BODY_LIMIT_BYTES);
    Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_service(service)
        .serve_with_incoming(incoming)
        .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::OperatorRequest;
    use super::*;

    struct Nobody;

    impl Admit for Nobody {
        fn admit(&self, _: Accepted) -> Result<(), String> {
            Err("no rank is expected".to_owned())
        }
    }

    impl Receive for Nobody {
        fn receive(&self, joined: Joined) -> Result<(), Refusal> {
            Err(Refusal::lasting(format!(
                "no host {} is expected",
                joined.join.name
            )))
        }
    }

    struct Echo;

    impl Operate for Echo {
        async fn operate(&self, call: OperatorCall) -> Option<OperatorReply> {
            (call.token == "right").then(|| OperatorReply::Done(format!("{:?}", call.request)))
        }
    }

    #[tokio::test]
    async fn a_host_that_nobody_expects_is_told_so() {
        let (listener, address) = bind("127.0.0.1:0").await.expect("a free port");
        let server = tokio::spawn(serve(listener, Nobody, Nobody, Echo));
        let words = Join {
            protocol: crate::control::PROTOCOL,
            token: "secret".to_owned(),
            name: "b".to_owned(),
            pid: 1,
            address: address.ip(),
        };
        assert!(!format!("{words:?}").contains("secret"));
        let refused = join(&address.to_string(), words)
            .await
            .err()
            .expect("nobody wants it");
        let expected = Refusal::lasting("no host b is expected");
        assert!(
            matches!(&refused, TransportError::Refused { refusal, .. } if *refusal == expected),
            "{refused}"
        );
        server.abort();
    }

    #[tokio::test]
    async fn an_operator_is_answered_a_stranger_is_not_and_nobody_is_told_apart() {
        let (listener, address) = bind("127.0.0.1:0").await.expect("a free port");
        let address = address.to_string();
        let server = tokio::spawn(serve(listener, Nobody, Nobody, Echo));
        let call = |token: &str| OperatorCall {
            token: token.to_owned(),
            request: OperatorRequest::CloseSamples,
        };
        let answer = operate(&address, call("right")).await.expect("it listens");
        assert_eq!(answer, OperatorReply::Done("CloseSamples".to_owned()));
        let stranger = operate(&address, call("wrong")).await.expect_err("another token");
        assert!(matches!(stranger, TransportError::Stranger { .. }), "{stranger}");
        assert!(!format!("{:?}", call("secret")).contains("secret"));
        server.abort();
        // The port is closed when the task has really ended.
        let _ = server.await;
        let nobody = operate(&address, call("right"))
            .await
            .expect_err("nobody listens");
        assert!(matches!(nobody, TransportError::Connect { .. }), "{nobody}");
    }
}
