//! Rings between ranks.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use control::launcher::{Error, ErrorKind, Result};
use fabric::ring::{RingListener, RingReader, RingSetup, RingWriter};
use serde::{Deserialize, Serialize};

use super::{Group, present};
use crate::messenger::{Call, CallDeadline, Messenger};

const READ: &str = "open ring from rank";
const WRITE: &str = "open ring to rank";

/// How long a reader that gives up tells the writer.
const WITHDRAWAL_TIMEOUT: Duration = Duration::from_millis(200);

/// What the reader of a ring tells its writer.
#[derive(Serialize, Deserialize)]
enum RingMessage {
    /// The reader listens here.
    Offer { address: SocketAddr, key: [u8; 16] },
    /// The reader has given up: its last offer is void.
    Withdrawn,
    /// The reader cannot listen, with the cause.
    Refused(String),
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
    /// [consent](crate::GroupOptions::insecure); [`Unavailable`](ErrorKind::Unavailable) if no
    /// [permitted provider](crate::GroupOptions::providers) serves it, also within a machine.
    pub fn ring_from(
        &mut self,
        rank: u32,
        setup: &RingSetup,
        timeout: Duration,
    ) -> Result<RingReader> {
        let deadline = CallDeadline::new(READ, timeout);
        self.ranks.check(READ, rank)?;
        let (mut listener, key) = match self.listen(rank, setup) {
            Ok(listens) => listens,
            Err(error) => {
                let _ = self.tell_writer(rank, &RingMessage::Refused(error.to_string()), deadline);
                return Err(error);
            }
        };
        let offer = RingMessage::Offer { address: listener.address(), key };
        self.tell_writer(rank, &offer, deadline)?;
        listener.accept(deadline.left()).map_err(|error| {
            let deadline = CallDeadline::new(READ, WITHDRAWAL_TIMEOUT);
            let _ = self.tell_writer(rank, &RingMessage::Withdrawn, deadline);
            of_ring(READ, rank, error)
        })
    }

    fn listen(&self, rank: u32, setup: &RingSetup) -> Result<(RingListener, [u8; 16])> {
        let mut key = [0; 16];
        getrandom::fill(&mut key)
            .map_err(|error| Error::new(READ, ErrorKind::Failed, error.to_string()))?;
        let setup = self.with_options(setup).key(key);
        let listener = match self.ranks.shares_loopback_with(rank) {
            true => self.listen_within_machine(rank, &setup)?,
            false => {
                let listener = setup.listen(SocketAddr::new(self.own_address(READ)?, 0));
                listener.map_err(|error| of_ring(READ, rank, error))?
            }
        };
        Ok((listener, key))
    }

    /// Listens on loopback; where its providers are not permitted, at the address of this machine: a
    /// network card serves no loopback address.
    fn listen_within_machine(&self, rank: u32, setup: &RingSetup) -> Result<RingListener> {
        let on_loopback = setup.listen(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0));
        let refusal = match on_loopback {
            Err(error) if error.kind() == fabric::ErrorKind::NoProvider => error,
            listener => return listener.map_err(|error| of_ring(READ, rank, error)),
        };
        let (refusal, remedy) = if self.options.is_insecure() {
            let address = SocketAddr::new(self.own_address(READ)?, 0);
            match setup.listen(address) {
                Err(error) if error.kind() == fabric::ErrorKind::NoProvider => {
                    (error, format!("or one that serves {}", address.ip()))
                }
                listener => return listener.map_err(|error| of_ring(READ, rank, error)),
            }
        } else {
            let remedy = "or permit the address of the machine: GroupOptions::insecure, \
                FABRICAST_INSECURE=true";
            (refusal, remedy.to_owned())
        };
        let detail = format!(
            "rank {rank} is on this machine: {refusal}. Permit a provider that serves loopback, \
             {remedy}. \"fabricast info\" lists the providers"
        );
        Err(Error::new(READ, ErrorKind::Unavailable, detail).of_ranks([rank]))
    }

    fn tell_writer(
        &mut self,
        rank: u32,
        message: &RingMessage,
        deadline: CallDeadline,
    ) -> Result<()> {
        let bytes = postcard::to_allocvec(message)
            .map_err(|error| Error::caused_by(READ, ErrorKind::Failed, error))?;
        let call = Call::new(present(&mut self.agent), &mut self.ranks, deadline);
        Messenger::send_direct(call, rank, &bytes)
    }

    /// Opens a ring that this rank writes and another one reads; that rank calls
    /// [`ring_from`](Self::ring_from) meanwhile.
    ///
    /// # Errors
    /// As [`ring_from`](Self::ring_from) and [`RingSetup::connect`]; the reader's error, if it cannot
    /// listen.
    pub fn ring_to(
        &mut self,
        rank: u32,
        setup: &RingSetup,
        timeout: Duration,
    ) -> Result<RingWriter> {
        let deadline = CallDeadline::new(WRITE, timeout);
        self.ranks.check(WRITE, rank)?;
        let (address, key) = self.receive_offer(rank, deadline)?;
        let setup = self.with_options(setup).key(key);
        setup.connect(address, deadline.left()).map_err(|error| of_ring(WRITE, rank, error))
    }

    /// The offer of the reader that waits now. Those that it has given up come before.
    fn receive_offer(
        &mut self,
        rank: u32,
        deadline: CallDeadline,
    ) -> Result<(SocketAddr, [u8; 16])> {
        loop {
            let call = Call::new(present(&mut self.agent), &mut self.ranks, deadline);
            let bytes = self.messenger.receive_direct(call, rank)?;
            let message = postcard::from_bytes(&bytes).map_err(|error| {
                Error::caused_by(WRITE, ErrorKind::Malformed, error).of_ranks([rank])
            })?;
            match message {
                RingMessage::Withdrawn => {}
                RingMessage::Offer { .. } if self.messenger.has_direct(rank) => {}
                RingMessage::Offer { address, key } => return Ok((address, key)),
                RingMessage::Refused(text) => {
                    let detail = format!("rank {rank}: {text}");
                    return Err(Error::new(WRITE, ErrorKind::RankFailed, detail).of_ranks([rank]));
                }
            }
        }
    }

    /// The setup with the options of the group, whose providers are those of all rings.
    fn with_options(&self, setup: &RingSetup) -> RingSetup {
        let setup = setup.clone().default_policy(self.options.provider_policy());
        if self.options.is_insecure() { setup.insecure() } else { setup }
    }
}

fn of_ring(operation: &'static str, rank: u32, error: fabric::Error) -> Error {
    let kind = match error.kind() {
        fabric::ErrorKind::DeadlineExceeded => ErrorKind::DeadlineExceeded,
        fabric::ErrorKind::InvalidArgument => ErrorKind::InvalidArgument,
        fabric::ErrorKind::NoProvider => ErrorKind::Unavailable,
        _ => ErrorKind::Failed,
    };
    Error::caused_by(operation, kind, error).of_ranks([rank])
}
