//! Links between hosts: one HTTP/2 POST per message.
//!
//! A link has a TCP connection of its own, so that a receiver who takes in nothing holds up this link and no other.
//!
//! | request | what it means | answered |
//! | --- | --- | --- |
//! | `POST /hello` | the token, the version and a [`Hello`](super::Hello) in headers | at once; the body of the answer stays open, and says why if the receiver ends the link |
//! | `POST /message` | sequence and lengths in headers, the message in the body | when it was delivered |
//! | `POST /goodbye` | how many messages there were; without it the end of the connection is a loss | when all of them were delivered |
//!
//! The body of a message is its header and its parts, without the empty ones, one after the other. If the hello says so,
//! each of these pieces is followed by its crc32c in 4 little-endian bytes.
//!
//! A sender has a few messages under way, but begins with a body only when the one before was handed to the connection. The
//! receiver takes bodies in one by one, in the order of their sequence, and none before its budget has room: until then
//! the flow control of HTTP/2 holds the sender.
//!
//! Windows and frame size are what the *receiver* of data sets. Both ends ping, because a stopped process or a cut cable
//! ends no connection.
//!
//! The connections of a process are driven by a few threads of one runtime. It exists while a link or a listener does.
//! These threads only move bytes: a copy and a checksum of a frame at a time, nothing else is computed there.

mod body;
mod intake;
mod receiver;
mod sender;
mod workers;

use std::error::Error as _;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use http::HeaderValue;
use rustix::io::Errno;

pub(super) use self::receiver::{Acceptor, listen};
pub(super) use self::sender::{Link, connect};
use super::MAX_TOKEN_BYTES;
use super::error::LinkError;

/// What a hello and its welcome say in [`VERSION_HEADER`]; ends of different binaries do not talk.
const VERSION: &str = "1";
const VERSION_HEADER: &str = "eaglet-link";
const HELLO_HEADER: &str = "eaglet-hello";
const CHECKED_HEADER: &str = "eaglet-checked";
const SEQUENCE_HEADER: &str = "eaglet-sequence";
const HEADER_BYTES_HEADER: &str = "eaglet-header-bytes";
const MESSAGE_BYTES_HEADER: &str = "eaglet-message-bytes";

const HELLO_PATH: &str = "/hello";
const MESSAGE_PATH: &str = "/message";
const GOODBYE_PATH: &str = "/goodbye";

/// Most messages under way: while one is delivered and its answer travels, others follow.
const MAX_UNDER_WAY: usize = 4;

/// Streams that a sender may have open: messages, the hello and the goodbye.
const MAX_STREAMS: u32 = MAX_UNDER_WAY as u32 + 2;

/// What a sender may send of a message that is not being taken in: enough to fill 25 Gb/s at a round trip of 1 ms, where
/// a window is renewed when half of it is used.
const STREAM_WINDOW_BYTES: u32 = 8 << 20;

/// As much as all streams together may use, so that those that wait can never take the window from the one that is being
/// taken in.
const CONNECTION_WINDOW_BYTES: u32 = MAX_STREAMS * STREAM_WINDOW_BYTES;

/// Window of the sender, who receives only answers and a reason of at most a KiB.
const ANSWER_WINDOW_BYTES: u32 = 64 << 10;

/// Largest piece of a body: it stays in the caches between checksum and copy, and costs few calls.
const FRAME_BYTES: u32 = 1 << 20;

/// Most bytes of the headers of a request.
const MAX_HEADERS_BYTES: u32 = 4 << 10;

/// Largest hello, in bytes of its header.
const HELLO_LIMIT_BYTES: usize = 512;

/// How often the ends ping when nothing else comes.
const PING_INTERVAL: Duration = Duration::from_millis(500);

/// How long a ping may go unanswered. A machine that computes on all cores answers late; one that is this late is lost.
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the end that ends a link waits for the other to hear of it.
const LAST_WORDS: Duration = Duration::from_millis(400);

/// Where links of other hosts come in, or go to, and the secret of the launch. Both ends need the same.
///
/// Nothing is encrypted: the network must be trusted, the token keeps out strangers and ranks of other launches.
#[derive(Clone, PartialEq, Eq)]
pub struct Network {
    /// Address; port 0 to listen on any.
    pub address: SocketAddr,
    /// Token, 1 to [`MAX_TOKEN_BYTES`] visible ASCII characters.
    pub token: String,
}

impl fmt::Debug for Network {
    /// Without the token: what is printed ends in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl Network {
    /// The header that carries the token.
    fn authorization(&self) -> Result<HeaderValue, LinkError> {
        let length = self.token.len();
        if length == 0 || length > MAX_TOKEN_BYTES || !self.token.bytes().all(|byte| byte.is_ascii_graphic())
        {
            return Err(LinkError::BadToken);
        }
        let mut value =
            HeaderValue::try_from(format!("Bearer {}", self.token)).map_err(|_| LinkError::BadToken)?;
        // Neither printed nor kept in the tables of the compression.
        value.set_sensitive(true);
        Ok(value)
    }
}

/// What the error with which a connection ended means for its link.
fn meaning(error: &hyper::Error, place: &'static str) -> LinkError {
    if error.is_timeout() {
        return LinkError::Silent {
            timeout_ms: PING_TIMEOUT.as_millis() as u64,
        };
    }
    match error
        .source()
        .and_then(|source| source.downcast_ref::<h2::Error>())
    {
        Some(error) if !error.is_io() && !error.is_remote() => LinkError::frame(format!("http/2: {error}")),
        _ => LinkError::PeerLost { place },
    }
}

/// For `map_err` on calls of the standard library.
fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> LinkError {
    move |error| LinkError::System {
        what,
        source: Errno::from_io_error(&error).unwrap_or(Errno::IO),
    }
}
