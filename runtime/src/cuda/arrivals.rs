//! Hidden states on their way to a device, ahead of the row that is computed.
//!
//! ARRIVAL-1: they go through pinned pieces, by a thread and on a stream of their own: neither the compute thread nor its stream
//! waits for them while it works on something else.
//! ARRIVAL-2: their memory is given back behind the last kernel that reads it.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;

use bytes::Bytes;

use super::device::{Cuda, must};
use super::driver::CudaError;
use super::kernels::{DeviceForm, RowChoice};
use super::matrix::{Indices, MatrixView};
use super::memory::{Buffer, Memory, View};
use super::stream::{Event, Stream};
use super::upload::Uploads;
use crate::contract::HiddenDtype;
use crate::device::MatrixMut;
use crate::row::HiddenStates;

/// Its name in the rank's account of memory.
const ROWS: &str = "hidden states of rows to come";

/// The way of hidden states to a device.
#[derive(Debug)]
pub(super) struct Arrivals {
    line: Arc<Line>,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Line {
    stream: Arc<Stream>,
    memory: Memory,
    uploads: Uploads,
}

/// States to send, and where to say that they are on their way.
struct Job {
    bytes: Bytes,
    sent: Sender<Result<Sent, CudaError>>,
}

/// States that lie on the device once the mark is reached.
#[derive(Debug)]
struct Sent {
    memory: Buffer<u8>,
    there: Event,
}

impl Line {
    fn send(&self, bytes: &[u8]) -> Result<Sent, CudaError> {
        let mut memory = self.memory.take::<u8>(ROWS, bytes.len())?;
        if !bytes.is_empty() {
            self.uploads
                .send(&self.stream, memory.view_mut(), |upload| upload.write(bytes))?;
        }
        let there = Event::new(self.stream.context())?;
        self.stream.record(&there)?;
        Ok(Sent { memory, there })
    }
}

impl Arrivals {
    pub(super) fn new(memory: &Memory, compute: &Stream) -> Result<Self, CudaError> {
        let stream = Arc::new(Stream::new(compute.context())?);
        let line = Arc::new(Line {
            memory: memory.beside(&stream)?,
            stream,
            uploads: Uploads::default(),
        });
        let (jobs, arriving) = channel::<Job>();
        let sending = Arc::clone(&line);
        let thread = std::thread::Builder::new()
            .name("arrivals".to_owned())
            .spawn(move || {
                for job in arriving {
                    // Whoever has changed his mind gives the memory back by that.
                    let _ = job.sent.send(sending.send(&job.bytes));
                }
            })
            .map_err(|error| CudaError::Call {
                call: "a thread for hidden states",
                code: error.raw_os_error().unwrap_or(0),
                name: "not started".to_owned(),
                text: error.to_string(),
            })?;
        Ok(Self {
            line,
            jobs: Some(jobs),
            thread: Some(thread),
        })
    }

    /// Begins to send states that will be read on the stream `compute`.
    fn begin(&self, states: &HiddenStates, compute: &Arc<Stream>) -> Arrival {
        let (sent, awaited) = channel();
        if let Some(jobs) = &self.jobs {
            // A thread that has ended is noticed by whoever waits.
            let _ = jobs.send(Job {
                bytes: states.bytes.clone(),
                sent,
            });
        }
        Arrival(Arc::new(Way {
            source: states.clone(),
            awaited: Mutex::new(awaited),
            sent: OnceLock::new(),
            line: Arc::clone(&self.line),
            compute: Arc::clone(compute),
        }))
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic was reported by the thread itself.
            let _ = thread.join();
        }
    }
}

/// Captured states of a row, `[tokens, states, hidden]`, on their way to a device or there.
#[derive(Clone, Debug)]
pub struct Arrival(Arc<Way>);

#[derive(Debug)]
struct Way {
    source: HiddenStates,
    awaited: Mutex<Receiver<Result<Sent, CudaError>>>,
    sent: OnceLock<Result<Sent, CudaError>>,
    line: Arc<Line>,
    compute: Arc<Stream>,
}

impl Arrival {
    /// The states, as they lie on the host.
    pub fn source(&self) -> &HiddenStates {
        &self.0.source
    }

    /// Whether these states, in this very memory, are on their way.
    pub fn is_of(&self, states: &HiddenStates) -> bool {
        let ours = &self.0.source;
        (ours.bytes.as_ptr(), ours.bytes.len()) == (states.bytes.as_ptr(), states.bytes.len())
            && (ours.dtype, ours.states, ours.hidden) == (states.dtype, states.states, states.hidden)
    }
}

impl Way {
    fn sent(&self) -> Result<&Sent, CudaError> {
        let lost = || CudaError::Call {
            call: "the thread for hidden states",
            code: 0,
            name: "ended".to_owned(),
            text: "it sends no more".to_owned(),
        };
        let sent = self.sent.get_or_init(|| {
            let awaited = self.awaited.lock().unwrap_or_else(PoisonError::into_inner);
            awaited.recv().unwrap_or_else(|_| Err(lost()))
        });
        sent.as_ref().map_err(Clone::clone)
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        let Some(Ok(_)) = self.sent.get() else { return };
        // ARRIVAL-2: what is freed on the line's stream comes behind what the compute stream was asked for until now. A
        // device that makes no mark has failed, and keeps nothing for anybody.
        let _ = Event::new(self.compute.context()).and_then(|used| {
            self.compute
                .record(&used)
                .and_then(|()| self.line.stream.wait_for(&used))
        });
    }
}

impl Cuda {
    /// Begins to send states.
    pub(super) fn begin_arrival(&self, states: &HiddenStates) -> Arrival {
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        let arrivals = match &mut *arrivals {
            Some(arrivals) => arrivals,
            none => none.insert(must(Arrivals::new(&self.memory, &self.stream))),
        };
        arrivals.begin(states, &self.stream)
    }

    /// `out[i]` = state `rows[i]` of those that were sent, counted over all tokens, as f32.
    pub(super) fn widen_arrival(&self, arrival: &Arrival, rows: &[u32], out: MatrixMut<'_>) {
        let source = arrival.source();
        let count = source.tokens() * source.states;
        assert_eq!(
            (rows.len(), source.hidden),
            (out.rows, out.cols),
            "shapes of widened states"
        );
        if rows.is_empty() || out.cols == 0 {
            return;
        }
        let end = rows.iter().max().map_or(0, |&row| row as usize + 1);
        assert!(end <= count, "state {} of {count}", end - 1);
        let sent = must(arrival.0.sent());
        must(self.stream.wait_for(&sent.there));
        let (view, len): (View<'_, u8>, usize) = (sent.memory.view(), count * source.hidden);
        let form = match source.dtype {
            HiddenDtype::F32 => DeviceForm::F32(MatrixView::new(view.typed(len), count, source.hidden)),
            HiddenDtype::Bf16 => DeviceForm::Bf16(MatrixView::new(view.typed(len), count, source.hidden)),
        };
        let mut places = self.room(rows.len());
        let places = must(Indices::upload(&self.stream, rows, places.view_mut()));
        let mut out = self.target_matrix(out);
        must(
            self.kernels
                .unpack(&self.stream, &form, RowChoice::Listed(places), 0, out.view_mut()),
        );
        self.settle(out.data);
    }
}
