//! What requests and answers carry.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::oneshot;

use super::FRAME_BYTES;
use crate::link::checksum::{CHECKSUM_BYTES, checksum_bytes, extend_checksum, flipped};
use crate::link::message::Encoded;

/// The body of a request: the pieces of a message, or nothing.
#[derive(Default)]
pub(super) struct RequestBody {
    /// What is left of the header and the parts that are not empty.
    pieces: VecDeque<Bytes>,
    checked: bool,
    /// Checksum of what has gone of the first piece.
    sum: u64,
    left_bytes: u64,
    /// For drills: the piece, counted from the first, in which a bit flips.
    corrupt: Option<u64>,
    /// Told when the connection has everything.
    handed_over: Option<oneshot::Sender<()>>,
}

impl RequestBody {
    /// The body of a message, and what is told when the connection has all of it.
    pub(super) fn new(
        message: Encoded,
        checked: bool,
        corrupt: Option<u64>,
    ) -> (Self, oneshot::Receiver<()>) {
        let (handed_over, told) = oneshot::channel();
        let pieces: VecDeque<Bytes> = std::iter::once(Bytes::from(message.header))
            .chain(message.parts)
            .filter(|piece| !piece.is_empty())
            .collect();
        let checksums_bytes = if checked { CHECKSUM_BYTES * pieces.len() } else { 0 };
        let body = Self {
            pieces,
            checked,
            sum: 0,
            left_bytes: message.message_bytes + checksums_bytes as u64,
            corrupt,
            handed_over: Some(handed_over),
        };
        (body, told)
    }

    /// Headers and parts that are left, in whole or in part.
    pub(super) fn pieces(&self) -> u64 {
        self.pieces.len() as u64
    }

    fn next(&mut self) -> Option<Bytes> {
        let piece = self.pieces.front_mut()?;
        let chunk = piece.split_to(piece.len().min(FRAME_BYTES as usize));
        let has_gone = piece.is_empty();
        if chunk.is_empty() {
            let checksum = checksum_bytes(self.sum);
            self.begin_piece();
            return Some(Bytes::copy_from_slice(&checksum));
        }
        let corrupt = self.corrupt.take_if(|nth| *nth == 0).is_some();
        if self.checked {
            self.sum = extend_checksum(self.sum, &chunk);
        } else if has_gone {
            self.begin_piece();
        }
        Some(if corrupt { flipped(&chunk).into() } else { chunk })
    }

    fn begin_piece(&mut self) {
        self.pieces.pop_front();
        self.sum = 0;
        self.corrupt = self.corrupt.and_then(|nth| nth.checked_sub(1));
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let chunk = self.next();
        if let Some(chunk) = &chunk {
            self.left_bytes = self.left_bytes.saturating_sub(chunk.len() as u64);
        }
        if self.pieces.is_empty()
            && let Some(handed_over) = self.handed_over.take()
        {
            // The link may have ended.
            let _ = handed_over.send(());
        }
        Poll::Ready(chunk.map(|chunk| Ok(Frame::data(chunk))))
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left_bytes)
    }
}

/// The body of an answer: nothing, a text, or one that comes later.
#[derive(Default)]
pub(super) struct Words {
    now: Option<Bytes>,
    later: Option<oneshot::Receiver<Bytes>>,
}

impl Words {
    pub(super) fn now(text: String) -> Self {
        Self {
            now: Some(text.into()),
            later: None,
        }
    }

    pub(super) fn later(words: oneshot::Receiver<Bytes>) -> Self {
        Self {
            now: None,
            later: Some(words),
        }
    }
}

impl Body for Words {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(later) = &mut self.later {
            let Poll::Ready(words) = Pin::new(later).poll(context) else {
                return Poll::Pending;
            };
            self.later = None;
            self.now = words.ok();
        }
        Poll::Ready(self.now.take().map(|words| Ok(Frame::data(words))))
    }

    fn is_end_stream(&self) -> bool {
        self.now.is_none() && self.later.is_none()
    }
}
