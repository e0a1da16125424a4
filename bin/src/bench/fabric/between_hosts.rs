//! Tensors over the loopback device, as they go to another host: a plain stream, and links between hosts.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::mpsc;

use anyhow::{Context, Result};
use bytes::Bytes;
use eaglet_runtime::link::SenderOptions;
use serde::Serialize;

use super::Plan;
use super::link::{Link, Way};
use crate::bench::facts::Spread;

/// Rates at one size of tensors, in GB/s.
#[derive(Debug, Serialize)]
pub(super) struct BetweenHosts {
    pub(super) bytes: usize,
    pub(super) tcp_gb_s: Spread,
    /// A link, with checksums.
    pub(super) link_gb_s: Spread,
    /// The same without checksums.
    pub(super) unchecked_gb_s: Spread,
}

pub(super) fn measure(bytes: usize, plan: &Plan<'_>) -> Result<BetweenHosts> {
    // A tensor of a message is f32.
    let bytes = bytes.next_multiple_of(4);
    let source: Vec<u8> = (0..bytes).map(|i| ((i * 31) >> 7) as u8).collect();
    let tensor = Bytes::from(source);
    let mut stream = Stream::open(bytes)?;
    let checked = Link::open(Way::Network, SenderOptions::default())?;
    let unchecked = Link::open(
        Way::Network,
        SenderOptions {
            checksum: false,
            ..SenderOptions::default()
        },
    )?;
    let part = |_: &Link| Some(tensor.clone());
    let [tcp_gb_s, link_gb_s, unchecked_gb_s] = plan.rates(
        bytes,
        &mut [
            &mut |count| stream.carry(count, &tensor),
            &mut |count| checked.carry(count, bytes, &part),
            &mut |count| unchecked.carry(count, bytes, &part),
        ],
    )?;
    Ok(BetweenHosts {
        bytes,
        tcp_gb_s,
        link_gb_s,
        unchecked_gb_s,
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
