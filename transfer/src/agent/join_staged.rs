//! Joining regions of two processes of one machine that copy through staging memory.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use ipc::Channel;

use super::Agent;
use super::host_staged::{STAGING_DESCRIPTORS, StagedMover, StagingLink};
use super::local_copies::LocalMover;
use super::local_protocol::{Reply, Request};
use super::local_session::{LocalSession, ProgressCallback, receive};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::region::{RegionDescriptor, RegisteredRegion};
use crate::remaining;

const OPEN: &str = "open staged region";

impl Agent {
    /// Requests that the target copies to and from its region, and prepares the own copies. The
    /// first join of a session maps and pins the staging memory.
    pub(super) fn join_staged(
        &mut self,
        peer: u32,
        local: &RegisteredRegion,
        remote: &RegionDescriptor,
        end: Instant,
    ) -> Result<LocalMover> {
        let channel = self.peers.get(peer, OPEN)?.local_session().and_then(LocalSession::channel);
        let Some(channel) = channel else {
            let detail = "the peer is no other process of this machine";
            return Err(Error::new(OPEN, ErrorKind::NoPath, detail));
        };
        let mut progress = || self.progress_while_waiting();
        let opened = request(&channel, remote, end, &mut progress);
        let session = self.peers.get(peer, OPEN)?.local_session_mut();
        if let (Err(_), Some(session)) = (&opened, session) {
            // The request may have ended the connection.
            session.refresh();
        }
        let files = opened?;
        let no_link = || Error::new(OPEN, ErrorKind::Malformed, "the peer sent no staging memory");
        let session = self.peers.get(peer, OPEN)?.local_session_mut().ok_or_else(no_link)?;
        if let Some(files) = files {
            if session.staging().is_some() {
                let detail = "the peer sent staging memory again";
                return Err(Error::new(OPEN, ErrorKind::Malformed, detail));
            }
            session.set_staging(Arc::new(StagingLink::open(files)?));
        }
        let link = session.staging().map(Arc::clone).ok_or_else(no_link)?;
        StagedMover::new(link, &local.buffer, remote).map(LocalMover::Staged)
    }
}

/// Requests a region. Returns the files of the session, with its first region.
fn request(
    channel: &Channel,
    remote: &RegionDescriptor,
    end: Instant,
    meanwhile: ProgressCallback<'_>,
) -> Result<Option<[OwnedFd; STAGING_DESCRIPTORS]>> {
    let request = Request::OpenStaged(remote.number, remote.ticket).encode();
    // Without a sent request no reply is pending.
    channel.send(&request, &[], remaining(end)).during(OPEN)?;
    let message = receive(channel, end, meanwhile).during(OPEN);
    let is_refused = message.as_ref().is_ok_and(|message| Reply::is_refusal(&message.bytes));
    let read = message.and_then(|message| Reply::read_staged(OPEN, message));
    if read.is_err() && !is_refused {
        // A late reply would be taken for the reply to the next request.
        channel.end();
    }
    read
}
