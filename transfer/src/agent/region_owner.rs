//! A session with an agent of this machine for the copy service: it maps regions of the agent, and
//! announces its copies like any initiator.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu::{Device, Memory};
use ipc::Channel;

use super::card::{self, AgentCard};
use super::local_protocol::{Reply, Request};
use super::local_session::{LocalSession, receive};
use super::local_target::LocalTarget;
use super::mapping::RegionExchange;
use super::{CONNECT, agent_files};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::host_buffer::HostBuffer;
use crate::region::RegionDescriptor;
use crate::remaining;
use crate::wire::malformed;

const DESCRIBE: &str = "describe region";

/// An agent that owns regions, as the copy service sees it.
#[derive(Debug)]
pub(crate) struct RegionOwnerSession(LocalSession);

/// Requests to the agent, which may take a while: copies are announced meanwhile.
#[derive(Debug)]
pub(crate) struct RegionChannel(Arc<Channel>);

/// A thread that only waits makes no progress meanwhile.
fn no_progress() -> Duration {
    Duration::MAX
}

impl RegionOwnerSession {
    /// Connects to the agent with this identity in a directory.
    pub(crate) fn connect(
        local_target: &LocalTarget,
        directory: &Path,
        identity: [u8; 16],
        end: Instant,
    ) -> Result<Self> {
        let socket = agent_files::socket_of(directory, identity);
        let card = AgentCard {
            identity,
            node: identity,
            machine: card::machine(),
            label: String::new(),
            socket: Some(socket.clone()),
            fabrics: Vec::new(),
            regions: Vec::new(),
        };
        if !agent_files::exists(&socket) {
            let detail = "the agent has ended, or its directory is another one";
            return Err(Error::new(CONNECT, ErrorKind::Closed, detail).at(&socket));
        }
        let session =
            LocalSession::begin(local_target, &card, &socket, remaining(end), &mut no_progress);
        session.map(Self)
    }

    pub(crate) fn channel(&self) -> Result<RegionChannel> {
        let closed = || Error::new(CONNECT, ErrorKind::Closed, "the agent is of this process");
        self.0.channel().map(RegionChannel).ok_or_else(closed)
    }

    /// Why nothing can be copied any more, if so.
    pub(crate) fn obstacle(&mut self) -> Option<(ErrorKind, &'static str)> {
        self.0.obstacle(None)
    }

    /// Checks the owner's process and the connection to it.
    pub(crate) fn refresh(&mut self) {
        self.0.refresh();
    }

    /// Why nothing can be copied to or from a region any more, as of the last
    /// [`refresh`](Self::refresh).
    pub(crate) fn known_obstacle(&self, region: u64) -> Option<(ErrorKind, &'static str)> {
        self.0.known_obstacle(Some(region))
    }

    /// Announces a copy with a region to its owner.
    pub(crate) fn begin_copy(
        &mut self,
        region: u64,
    ) -> std::result::Result<u64, (ErrorKind, &'static str)> {
        self.0.begin_copy(Some(region))
    }

    pub(crate) fn end_copy(&mut self, number: u64) {
        self.0.end_copy(number);
    }
}

impl RegionChannel {
    /// The region with this number and ticket, as its owner describes it.
    pub(crate) fn describe(
        &self,
        number: u64,
        ticket: u64,
        end: Instant,
    ) -> Result<RegionDescriptor> {
        let Self(channel) = self;
        let request = Request::Describe(number, ticket).encode();
        channel.send(&request, &[], remaining(end)).during(DESCRIBE)?;
        let message =
            receive(channel, end, &mut no_progress).during(DESCRIBE).inspect_err(|_| {
                // The reply would be taken for the reply to the next request.
                channel.end();
            })?;
        let region = Reply::read_described(DESCRIBE, &message.bytes)?;
        match (region.number, region.ticket) == (number, ticket) {
            true => Ok(region),
            false => Err(malformed(DESCRIBE, "description of another region")),
        }
    }

    /// Maps a region of device memory.
    pub(crate) fn map_for(
        &self,
        region: &RegionDescriptor,
        device: &Device,
        end: Instant,
    ) -> Result<Memory> {
        let (channel, mut meanwhile) = (Some(Arc::clone(&self.0)), no_progress);
        RegionExchange::new(channel, region, end, &mut meanwhile).map_for(device)
    }

    /// Maps a region of host memory.
    pub(crate) fn map_host(&self, region: &RegionDescriptor, end: Instant) -> Result<HostBuffer> {
        let (channel, mut meanwhile) = (Some(Arc::clone(&self.0)), no_progress);
        RegionExchange::new(channel, region, end, &mut meanwhile).map_host()
    }
}
