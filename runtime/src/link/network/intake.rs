//! Takes the messages of one connection in, one after the other.

use std::sync::Arc;

use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderValue, Request};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::{Notify, mpsc, oneshot};

use super::{HEADER_BYTES_HEADER, MESSAGE_BYTES_HEADER, SEQUENCE_HEADER, meaning};
use crate::link::assembly::{Assembly, weight_bytes};
use crate::link::checksum::{CHECKSUM_BYTES, extend_checksum};
use crate::link::error::LinkError;
use crate::link::hello::Endpoint;
use crate::link::listener::Hub;
use crate::link::message::{BulkMessage, decode_header};
use crate::link::pool::Budget;
use crate::wire::BODY_LIMIT_BYTES;

/// A request whose body has not been read.
pub(super) struct Arrived {
    /// Whether it is the goodbye, and no message.
    pub(super) goodbye: bool,
    pub(super) request: Request<Incoming>,
    /// Told when it was delivered.
    pub(super) delivered: oneshot::Sender<()>,
}

/// What puts the messages of one connection together.
pub(super) struct Intake {
    hub: Arc<Hub>,
    from: Endpoint,
    checked: bool,
    budget: Arc<Budget>,
    /// Told when the consumer gives bytes back.
    room: Arc<Notify>,
    /// Messages so far.
    sequence: u64,
    /// Headers and parts so far.
    pieces: u64,
}

impl Intake {
    pub(super) fn new(hub: &Arc<Hub>, from: Endpoint, checked: bool) -> Self {
        let room = Arc::new(Notify::new());
        let wake = Arc::clone(&room);
        let wake = Box::new(move || wake.notify_one());
        Self {
            hub: Arc::clone(hub),
            from,
            checked,
            budget: Budget::new(hub.options.held_bytes_per_connection, wake),
            room,
            sequence: 0,
            pieces: 0,
        }
    }

    /// Delivers messages until the peer says goodbye.
    pub(super) async fn run(mut self, mut arriving: mpsc::Receiver<Arrived>) -> Result<(), LinkError> {
        while let Some(Arrived {
            goodbye,
            request,
            delivered,
        }) = arriving.recv().await
        {
            let sequence = number(request.headers(), SEQUENCE_HEADER)?;
            if sequence != self.sequence {
                return Err(LinkError::frame(format!(
                    "message {sequence} where {} was expected",
                    self.sequence
                )));
            }
            if goodbye {
                // The peer may be gone already.
                let _ = delivered.send(());
                return Ok(());
            }
            let message = self.take(request).await?;
            self.sequence += 1;
            self.hub.deliver(message);
            // As above; the end of the connection tells.
            let _ = delivered.send(());
        }
        // The connection has gone before.
        Err(LinkError::PeerLost {
            place: "between two messages",
        })
    }

    async fn take(&mut self, request: Request<Incoming>) -> Result<BulkMessage, LinkError> {
        let message_bytes = number(request.headers(), MESSAGE_BYTES_HEADER)?;
        let header_bytes = number(request.headers(), HEADER_BYTES_HEADER)?;
        let limit_bytes = self.hub.options.max_message_bytes;
        if message_bytes > limit_bytes {
            return Err(LinkError::TooLarge {
                bytes: message_bytes,
                limit_bytes,
            });
        }
        if header_bytes == 0 || header_bytes > BODY_LIMIT_BYTES as u64 || header_bytes > message_bytes {
            return Err(LinkError::frame(format!(
                "a header of {header_bytes} bytes in a message of {message_bytes}"
            )));
        }
        let header_bytes = header_bytes as usize;
        let mut body = MessageBody {
            body: request.into_body(),
            chunk: Bytes::new(),
        };
        let mut place = 0;
        // Grows by what arrives, whatever was announced.
        let mut header = Vec::new();
        while header.len() < header_bytes {
            let chunk = body.chunk(header_bytes - header.len()).await?;
            header.extend_from_slice(&chunk);
        }
        self.check(&mut body, extend_checksum(0, &header), &mut place)
            .await?;
        let header = decode_header(&header, message_bytes, self.from.seat, self.from.generation)?;
        self.wait_for_room(weight_bytes(header_bytes, message_bytes))
            .await;
        let mut message = Assembly::new(header, header_bytes, &self.budget, &self.hub.pool);
        let mut sum = 0;
        while !message.is_whole() {
            let rest = message.rest();
            let chunk = body.chunk(rest.len()).await?;
            rest[..chunk.len()].copy_from_slice(&chunk);
            if self.checked {
                sum = extend_checksum(sum, &chunk);
            }
            if message.filled(chunk.len()) {
                self.check(&mut body, sum, &mut place).await?;
                sum = 0;
            }
        }
        body.end().await?;
        Ok(message.into_message())
    }

    /// Compares a piece with the checksum that follows it.
    async fn check(&mut self, body: &mut MessageBody, actual: u64, place: &mut u32) -> Result<(), LinkError> {
        if self.checked {
            let mut announced = [0; CHECKSUM_BYTES];
            let mut filled = 0;
            while filled < CHECKSUM_BYTES {
                let chunk = body.chunk(CHECKSUM_BYTES - filled).await?;
                announced[filled..filled + chunk.len()].copy_from_slice(&chunk);
                filled += chunk.len();
            }
            let announced = u64::from(u32::from_le_bytes(announced));
            if announced != actual {
                return Err(LinkError::Checksum {
                    sequence: self.pieces,
                    place: *place,
                    announced,
                    actual,
                });
            }
        }
        self.pieces += 1;
        *place += 1;
        Ok(())
    }

    /// L-1: waits for the consumer to give buffers back. What is not read meanwhile holds up the sender; the end of the
    /// connection ends the wait with its task.
    async fn wait_for_room(&self, bytes: u64) {
        while !self.budget.admits(bytes) {
            self.room.notified().await;
        }
    }
}

/// A number in a header.
fn number(headers: &HeaderMap, name: &str) -> Result<u64, LinkError> {
    let value = headers.get(name).map_or(&[][..], HeaderValue::as_bytes);
    let number = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
    number.ok_or_else(|| LinkError::frame(format!("`{}` is no number for {name}", value.escape_ascii())))
}

/// The body of a message as it comes in.
struct MessageBody {
    body: Incoming,
    /// What came and was not wanted yet.
    chunk: Bytes,
}

impl MessageBody {
    /// What comes next, at least one byte and at most `most`.
    async fn chunk(&mut self, most: usize) -> Result<Bytes, LinkError> {
        while !self.chunk.has_remaining() {
            if !self.more().await? {
                return Err(LinkError::frame("a message that ends before it is whole"));
            }
        }
        Ok(self.chunk.split_to(most.min(self.chunk.len())))
    }

    /// Nothing may follow.
    async fn end(&mut self) -> Result<(), LinkError> {
        while !self.chunk.has_remaining() {
            if !self.more().await? {
                return Ok(());
            }
        }
        Err(LinkError::frame("a message that goes on after its end"))
    }

    /// Reads a frame of HTTP/2; says whether there was one.
    async fn more(&mut self) -> Result<bool, LinkError> {
        match self.body.frame().await {
            None => Ok(false),
            Some(Ok(frame)) => match frame.into_data() {
                Ok(chunk) => {
                    self.chunk = chunk;
                    Ok(true)
                }
                Err(_) => Err(LinkError::frame("a message with trailers")),
            },
            Some(Err(error)) => Err(meaning(&error, "in the middle of a message")),
        }
    }
}
