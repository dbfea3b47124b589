//! The rendezvous of the ranks of a machine: one segment of memory for all, and a descriptor of each
//! process.
//!
//! The first rank listens at a socket in the directory, and waits for all others there. When all have
//! come and agree, it sends each the segment and the descriptors of all processes, and removes the
//! socket. No thread serves it and nothing is left behind: the segment has no name, and a socket
//! without a listener is replaced. A rank whose listener died before it had the segment begins anew.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, ChannelListener, Layout, PidFd, Segment};
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};

const OPERATION: &str = "join communication domain";
const HELLO: u8 = 0xc1;
pub(crate) const WELCOME: u8 = 0xc2;
const REFUSED: u8 = 0xc3;
pub(crate) const RANK: u8 = 0xc4;
/// Pause before a rank looks again for a listener that is about to begin or end.
const RETRY: Duration = Duration::from_millis(2);
/// Time between two looks whether a rank that waits has gone.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// How long a process takes to end, at most.
const ENDING_TIME: Duration = Duration::from_millis(500);
/// Other ranks wait for the messages, so that there is space for them.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// What a rank must have in common with the others, and what it needs.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    /// The path of the socket: the same for all ranks of the rendezvous, and of no other one.
    socket: PathBuf,
    rank: u32,
    ranks: u32,
    /// A text that says what a rank expects, of which all must be equal.
    setup: String,
    layout: Layout,
    /// Bytes of the segment.
    length: usize,
    /// What this rank gives to all others.
    offer: Offer,
}

/// What a rank gives to all others: bytes and descriptors, of which a message has at most 63.
#[derive(Debug, Default)]
pub(crate) struct Offer {
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

/// What a rank has after the rendezvous.
#[derive(Debug)]
pub(crate) struct JoinedRanks {
    segment: Segment,
    /// The process of each rank.
    pidfds: Vec<PidFd>,
    /// The ids of the processes, as the rank that listened sees them; 0 if it does not.
    process_ids: Vec<u32>,
    /// What each rank gives.
    offers: Vec<Offer>,
}

impl JoinedRanks {
    /// The segment, the process of each rank, the ids of the processes, and what each rank gives.
    pub(crate) fn into_parts(self) -> (Segment, Vec<PidFd>, Vec<u32>, Vec<Offer>) {
        (self.segment, self.pidfds, self.process_ids, self.offers)
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    rank: u32,
    setup: String,
    offer: Vec<u8>,
}

/// A rank that waits for the others.
struct PendingRank {
    channel: Channel,
    pidfd: PidFd,
    process_id: u32,
    offer: Offer,
}

fn failed(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::caused_by(OPERATION, ErrorKind::Failed, cause)
}

fn missing(ranks: impl IntoIterator<Item = u32>) -> Error {
    let ranks: Vec<u32> = ranks.into_iter().collect();
    let texts: Vec<_> = ranks.iter().take(8).map(u32::to_string).collect();
    let more = if ranks.len() > 8 { ", …" } else { "" };
    let detail = format!("rank {}{more} did not come", texts.join(", "));
    Error::new(OPERATION, ErrorKind::DeadlineExceeded, detail).of_ranks(ranks)
}

impl Offer {
    pub(crate) fn new(bytes: Vec<u8>, descriptors: Vec<OwnedFd>) -> Self {
        Self { bytes, descriptors }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn descriptors(&self) -> &[OwnedFd] {
        &self.descriptors
    }

    /// The descriptors of a message: that of the process, then these.
    fn with<'a>(&'a self, process: &'a PidFd) -> Vec<BorrowedFd<'a>> {
        std::iter::once(process.as_fd()).chain(self.descriptors.iter().map(AsFd::as_fd)).collect()
    }

    fn try_clone(&self) -> io::Result<Self> {
        let descriptors =
            self.descriptors.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>();
        Ok(Self { bytes: self.bytes.clone(), descriptors: descriptors? })
    }
}

impl Rendezvous {
    /// Of a rank and the number of ranks, with the layout and the bytes of the segment.
    pub(crate) fn new(
        socket: PathBuf,
        [rank, ranks]: [u32; 2],
        setup: String,
        layout: Layout,
        length: usize,
        offer: Offer,
    ) -> Self {
        Self { socket, rank, ranks, setup, layout, length, offer }
    }

    /// Waits for the other ranks.
    pub(crate) fn join(&self, timeout: Duration) -> Result<JoinedRanks> {
        let deadline = ipc::deadline(timeout);
        if let Some(directory) = self.socket.parent() {
            create_directory(directory)?;
        }
        loop {
            match ChannelListener::bind(&self.socket) {
                Ok(listener) => return self.serve(&listener, deadline),
                Err(ChannelError::InUse(_)) => {}
                Err(error) => return Err(failed(error)),
            }
            if let Some(joined) = self.connect(deadline)? {
                return Ok(joined);
            }
            if Instant::now() >= deadline {
                return Err(missing((0..self.ranks).filter(|rank| *rank != self.rank)));
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Waits at the listener of another rank; None if that ended without a result.
    fn connect(&self, deadline: Instant) -> Result<Option<JoinedRanks>> {
        let left = || deadline.saturating_duration_since(Instant::now());
        let Ok(channel) = Channel::connect(&self.socket, left()) else { return Ok(None) };
        let own = PidFd::of_this_process().map_err(failed)?;
        let offer = self.offer.bytes.clone();
        let hello = Hello { rank: self.rank, setup: self.setup.clone(), offer };
        let bytes = control::codec::encode(HELLO, &hello);
        if channel.send(&bytes, &self.offer.with(&own), left()).is_err() {
            return Ok(None);
        }
        let message = match channel.receive(left()) {
            Ok(message) => message,
            Err(ChannelError::Closed) => return Ok(None),
            Err(ChannelError::DeadlineExceeded { .. }) => {
                return Err(missing((0..self.ranks).filter(|rank| *rank != self.rank)));
            }
            Err(error) => return Err(failed(error)),
        };
        if message.bytes.first() == Some(&REFUSED) {
            let refusal: Refusal =
                control::codec::decode(REFUSED, &message.bytes).map_err(malformed)?;
            return Err(refusal.into_error());
        }
        let process_ids: Vec<u32> =
            control::codec::decode(WELCOME, &message.bytes).map_err(malformed)?;
        let file = message.descriptors.into_iter().next().ok_or_else(|| malformed("no segment"))?;
        let segment = Segment::open(file, self.layout)
            .map_err(|error| Error::caused_by(OPERATION, ErrorKind::Malformed, error))?;
        let (mut pidfds, mut offers) = (Vec::new(), Vec::new());
        for _ in 0..self.ranks {
            let message = channel.receive(left()).map_err(failed)?;
            let bytes = control::codec::decode(RANK, &message.bytes).map_err(malformed)?;
            let mut descriptors = message.descriptors.into_iter();
            let pidfd =
                descriptors.next().ok_or_else(|| malformed("no descriptor of a process"))?;
            pidfds.push(PidFd::from_fd(pidfd).map_err(failed)?);
            offers.push(Offer { bytes, descriptors: descriptors.collect() });
        }
        let is_complete = process_ids.len() == pidfds.len() && segment.body_length() >= self.length;
        if !is_complete {
            return Err(malformed("another number of ranks or bytes"));
        }
        Ok(Some(JoinedRanks { segment, pidfds, process_ids, offers }))
    }

    /// Waits for all other ranks, and gives them the segment.
    fn serve(&self, listener: &ChannelListener, deadline: Instant) -> Result<JoinedRanks> {
        let mut others: BTreeMap<u32, PendingRank> = BTreeMap::new();
        while others.len() + 1 < self.ranks as usize {
            let left = deadline.saturating_duration_since(Instant::now());
            let channel = match listener.accept(left.min(CHECK_INTERVAL)) {
                Ok(channel) => channel,
                Err(ChannelError::DeadlineExceeded { .. }) if left.is_zero() => {
                    let is_missing = |rank: &u32| *rank != self.rank && !others.contains_key(rank);
                    return Err(missing((0..self.ranks).filter(is_missing)));
                }
                Err(ChannelError::DeadlineExceeded { .. }) => {
                    // A rank that gave up, or died, may come again.
                    others.retain(|_, other| !other.channel.is_shut_down());
                    continue;
                }
                Err(error) => return Err(failed(error)),
            };
            // Other programs may connect, too.
            let Ok((hello, other)) = receive_hello(channel) else { continue };
            others.retain(|_, other| !other.channel.is_shut_down());
            // A process that was killed, and started again, may still be ending.
            let has_ended = |other: &mut PendingRank| other.pidfd.exits_within(ENDING_TIME);
            if others.get_mut(&hello.rank).is_some_and(has_ended) {
                others.remove(&hello.rank);
            }
            if let Some(refusal) = self.check(&hello, others.contains_key(&hello.rank)) {
                let bytes = control::codec::encode(REFUSED, &refusal);
                for other in others.values().chain([&other]) {
                    let _ = other.channel.send(&bytes, &[], Duration::ZERO);
                }
                return Err(refusal.into_error());
            }
            others.insert(hello.rank, other);
        }
        self.welcome(others)
    }

    /// Gives all other ranks the segment. A rank that has died meanwhile is found by its descriptor.
    fn welcome(&self, others: BTreeMap<u32, PendingRank>) -> Result<JoinedRanks> {
        let segment = Segment::create(self.layout, self.length).map_err(failed)?;
        segment.mark_ready();
        let own = PidFd::of_this_process().map_err(failed)?;
        let (mut pidfds, mut process_ids) = (Vec::new(), Vec::new());
        for rank in 0..self.ranks {
            let other = others.get(&rank);
            let pidfd = other.map_or(&own, |other| &other.pidfd);
            pidfds.push(pidfd.try_clone().map_err(failed)?);
            process_ids.push(other.map_or(std::process::id(), |other| other.process_id));
        }
        let bytes = control::codec::encode(WELCOME, &process_ids);
        for other in others.values() {
            let send = |bytes: &[u8], descriptors: &[BorrowedFd<'_>]| {
                let _ = other.channel.send(bytes, descriptors, SEND_TIMEOUT);
            };
            send(&bytes, &[segment.as_fd()]);
            for rank in 0..self.ranks {
                let (offer, pidfd) = match others.get(&rank) {
                    Some(of) => (&of.offer, &of.pidfd),
                    None => (&self.offer, &own),
                };
                send(&control::codec::encode(RANK, &offer.bytes), &offer.with(pidfd));
            }
        }
        let own_offer = self.offer.try_clone().map_err(failed)?;
        let mut offers: BTreeMap<u32, Offer> =
            others.into_iter().map(|(rank, other)| (rank, other.offer)).collect();
        offers.insert(self.rank, own_offer);
        let offers = offers.into_values().collect();
        Ok(JoinedRanks { segment, pidfds, process_ids, offers })
    }

    /// Why a rank is refused.
    fn check(&self, hello: &Hello, is_present: bool) -> Option<Refusal> {
        let rank = hello.rank;
        if hello.setup != self.setup {
            let detail = format!(
                "rank {rank} has {}, rank {} has {}. Start the same build with the same options on \
                 all ranks",
                hello.setup, self.rank, self.setup
            );
            return Some(Refusal { is_version: true, ranks: vec![rank, self.rank], detail });
        }
        let detail = if rank >= self.ranks {
            format!("rank {rank} does not exist: the domain has {} ranks", self.ranks)
        } else if rank == self.rank || is_present {
            format!("two processes have rank {rank}")
        } else {
            return None;
        };
        Some(Refusal { is_version: false, ranks: vec![rank], detail })
    }
}

/// Why no rank joins.
#[derive(Debug, Serialize, Deserialize)]
struct Refusal {
    is_version: bool,
    ranks: Vec<u32>,
    detail: String,
}

impl Refusal {
    fn into_error(self) -> Error {
        let kind =
            if self.is_version { ErrorKind::VersionMismatch } else { ErrorKind::InvalidArgument };
        Error::new(OPERATION, kind, self.detail).of_ranks(self.ranks)
    }
}

/// The first message of a rank.
fn receive_hello(channel: Channel) -> Result<(Hello, PendingRank)> {
    // A rank sends it at once: this bounds the delay by other processes.
    let message = channel.receive(Duration::from_secs(1)).map_err(failed)?;
    let mut hello: Hello = control::codec::decode(HELLO, &message.bytes).map_err(malformed)?;
    let mut descriptors = message.descriptors.into_iter();
    let pidfd = descriptors.next().ok_or_else(|| malformed("no descriptor of a process"))?;
    let pidfd = PidFd::of_peer(&channel, pidfd).map_err(failed)?;
    let process_id = channel.credentials().map_err(failed)?.process.unwrap_or(0);
    let bytes = std::mem::take(&mut hello.offer);
    let offer = Offer { bytes, descriptors: descriptors.collect() };
    Ok((hello, PendingRank { channel, pidfd, process_id, offer }))
}

fn malformed(why: impl ToString) -> Error {
    Error::new(OPERATION, ErrorKind::Malformed, why.to_string())
}

/// Creates a directory for this user, with its parents.
fn create_directory(directory: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(|error| {
        let remedy = errors::files::remedy(&error).map(|remedy| format!(". {remedy}"));
        let detail = format!(
            "create directory {}: {error}{}",
            directory.display(),
            remedy.unwrap_or_default()
        );
        Error::new(OPERATION, ErrorKind::Failed, detail)
    })
}
