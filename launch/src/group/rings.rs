//! Rings between ranks.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use control::launcher::{Error, ErrorKind, Result};
use fabric::ring::{RingReader, RingSetup, RingWriter};
use serde::{Deserialize, Serialize};

use super::Group;
use crate::messenger::CallDeadline;

const READ: &str = "open ring from rank";
const WRITE: &str = "open ring to rank";

/// Where a rank listens for the writer of a ring.
#[derive(Serialize, Deserialize)]
struct RingAddress {
    address: SocketAddr,
    key: [u8; 16],
}

impl Group {
    /// Opens a ring that another rank writes and this one reads; that rank calls
    /// [`ring_to`](Self::ring_to) meanwhile. Several rings from one rank are opened in the order of
    /// the calls.
    ///
    /// ```
    /// use std::time::Duration;
    /// use fabric::ring::RingSetup;
    /// use launch::Group;
    /// let timeout = Duration::from_secs(10);
    /// let mut group = Group::start()?;
    /// let setup = RingSetup::new().capacity(64 << 20);
    /// match group.rank() {
    ///     _ if group.size() < 2 => {}
    ///     0 => group.ring_to(1, &setup, timeout)?.send(b"hello", timeout)?,
    ///     1 => assert_eq!(group.ring_from(0, &setup, timeout)?.receive(timeout)?, b"hello"),
    ///     _ => {}
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for this rank itself;
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) and
    /// [`RankFailed`](ErrorKind::RankFailed) with the rank; errors of
    /// [`RingSetup::listen`]: beyond loopback a ring needs
    /// [consent](crate::GroupOptions::insecure).
    pub fn ring_from(
        &mut self,
        rank: u32,
        setup: &RingSetup,
        timeout: Duration,
    ) -> Result<RingReader> {
        let deadline = CallDeadline::new(READ, timeout);
        self.ranks.check(READ, rank)?;
        let failed = |error| of_ring(READ, rank, error);
        let key = random_key(READ)?;
        let address = match self.ranks.shares_loopback_with(rank) {
            true => IpAddr::V4(Ipv4Addr::LOCALHOST),
            false => self.own_address()?,
        };
        let setup = self.with_consent(setup).key(key);
        let mut listener = setup.listen(SocketAddr::new(address, 0)).map_err(failed)?;
        let ring = RingAddress { address: listener.address(), key };
        let bytes = postcard::to_allocvec(&ring)
            .map_err(|error| Error::caused_by(READ, ErrorKind::Failed, error))?;
        self.messenger.send_direct(&mut self.agent, &mut self.ranks, rank, &bytes, deadline)?;
        listener.accept(deadline.left()).map_err(failed)
    }

    /// Opens a ring that this rank writes and another one reads; that rank calls
    /// [`ring_from`](Self::ring_from) meanwhile.
    ///
    /// # Errors
    /// As [`ring_from`](Self::ring_from) and [`RingSetup::connect`].
    pub fn ring_to(
        &mut self,
        rank: u32,
        setup: &RingSetup,
        timeout: Duration,
    ) -> Result<RingWriter> {
        let deadline = CallDeadline::new(WRITE, timeout);
        self.ranks.check(WRITE, rank)?;
        let bytes = self.messenger.receive_direct(&mut self.agent, &self.ranks, rank, deadline)?;
        let RingAddress { address, key } = postcard::from_bytes(&bytes).map_err(|error| {
            Error::caused_by(WRITE, ErrorKind::Malformed, error).of_ranks([rank])
        })?;
        let setup = self.with_consent(setup).key(key);
        setup.connect(address, deadline.left()).map_err(|error| of_ring(WRITE, rank, error))
    }

    fn with_consent(&self, setup: &RingSetup) -> RingSetup {
        let setup = setup.clone();
        if self.options.is_insecure() { setup.insecure() } else { setup }
    }
}

fn of_ring(operation: &'static str, rank: u32, error: fabric::Error) -> Error {
    let kind = match error.kind() {
        fabric::ErrorKind::DeadlineExceeded => ErrorKind::DeadlineExceeded,
        fabric::ErrorKind::InvalidArgument => ErrorKind::InvalidArgument,
        _ => ErrorKind::Failed,
    };
    Error::caused_by(operation, kind, error).of_ranks([rank])
}

fn random_key(operation: &'static str) -> Result<[u8; 16]> {
    let mut key = [0; 16];
    getrandom::fill(&mut key)
        .map_err(|error| Error::new(operation, ErrorKind::Failed, error.to_string()))?;
    Ok(key)
}
