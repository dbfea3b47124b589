//! Regions of other processes of this machine, mapped into this process.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use gpu::{Device, LegacyHandle, Memory};
use ipc::{Channel, ChannelError};

use super::Agent;
use super::local_protocol::{Reply, Request};
use super::local_session::{LocalSession, ProgressCallback, receive};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::host_buffer::HostBuffer;
use crate::path::{Exportability, MemoryType};
use crate::region::RegionDescriptor;
use crate::remaining;
use crate::share::check_device;
use crate::wire::malformed;

const OPEN: &str = "open region";

/// Receives each piece of a region: descriptor, length, and the bytes of all pieces.
type PieceSink<'a> = &'a mut dyn FnMut(OwnedFd, u64, u64) -> Result<()>;

impl Agent {
    /// Maps a peer's region for a device of this process, once.
    pub(super) fn map_for(
        &mut self,
        peer: u32,
        region: &RegionDescriptor,
        device: &Device,
        end: Instant,
    ) -> Result<Memory> {
        if let Some(memory) = self.peers.get(peer, OPEN)?.mapped(region.number, device.name()) {
            return Ok(memory);
        }
        let memory = self.request_region(peer, region, end, |request| request.map_for(device))?;
        self.peers.get(peer, OPEN)?.cache_mapping(region.number, &memory);
        Ok(memory)
    }

    /// Maps a peer's region of host memory, once.
    pub(super) fn map_host(
        &mut self,
        peer: u32,
        region: &RegionDescriptor,
        end: Instant,
    ) -> Result<HostBuffer> {
        let (number, is_writable) = (region.number, region.rights.write);
        if let Some(buffer) = self.peers.get(peer, OPEN)?.mapped_host(number, is_writable) {
            return Ok(buffer);
        }
        let buffer = self.request_region(peer, region, end, |request| request.map_host())?;
        self.peers.get(peer, OPEN)?.cache_host_mapping(number, buffer.clone());
        Ok(buffer)
    }

    /// Requests a region, and makes progress until it is mapped.
    fn request_region<T>(
        &mut self,
        peer: u32,
        region: &RegionDescriptor,
        end: Instant,
        map: impl FnOnce(&mut RegionExchange<'_>) -> Result<T>,
    ) -> Result<T> {
        let channel = self.peers.get(peer, OPEN)?.local_session().and_then(LocalSession::channel);
        let mut progress = || self.progress_while_waiting();
        let mapped = map(&mut RegionExchange::new(channel, region, end, &mut progress));
        if mapped.is_err() {
            // The request may have ended the connection.
            self.peers.get(peer, OPEN)?.refresh();
        }
        mapped
    }
}

/// An exchange for a region with its owner.
pub(super) struct RegionExchange<'a> {
    /// None if no descriptors can be passed.
    channel: Option<Arc<Channel>>,
    region: &'a RegionDescriptor,
    end: Instant,
    meanwhile: ProgressCallback<'a>,
}

impl<'a> RegionExchange<'a> {
    pub(super) fn new(
        channel: Option<Arc<Channel>>,
        region: &'a RegionDescriptor,
        end: Instant,
        meanwhile: ProgressCallback<'a>,
    ) -> Self {
        Self { channel, region, end, meanwhile }
    }

    /// Maps device memory for a device of this process.
    pub(super) fn map_for(&mut self, device: &Device) -> Result<Memory> {
        match self.region.memory_type {
            MemoryType::Device(Exportability::ByDescriptors) => self.import(device),
            MemoryType::Device(Exportability::ByLegacyHandle) => self.import_legacy(device),
            _ => {
                let detail = "its memory is no device memory that can be mapped";
                Err(Error::new(OPEN, ErrorKind::NoPath, detail))
            }
        }
    }

    fn import(&mut self, device: &Device) -> Result<Memory> {
        let mut importer = None;
        self.receive(&mut |descriptor, length, bytes| {
            // The last piece may be much longer than the region's part of it.
            let importer = match &mut importer {
                Some(importer) => importer,
                none => none.insert(device.importer(bytes).during(OPEN)?),
            };
            importer.add(descriptor.as_fd(), length).during(OPEN)
        })?;
        let RegionDescriptor { offset, length, .. } = *self.region;
        let memory = importer.ok_or_else(no_descriptor)?.finish(offset, length).during(OPEN)?;
        check_device(OPEN, &memory, self.region.device)?;
        Ok(memory)
    }

    fn import_legacy(&mut self, device: &Device) -> Result<Memory> {
        // The reply has no pieces, but it reports whether the region exists.
        self.receive(&mut |_, _, _| Ok(()))?;
        let RegionDescriptor { legacy, offset, length, .. } = *self.region;
        let Some(bytes) = legacy else {
            return Err(malformed(OPEN, "the descriptor has no legacy handle"));
        };
        // For memory opened by legacy handle the driver reports the opening device: nothing to
        // compare.
        device.open_legacy_handle(&LegacyHandle { bytes, offset, length }).during(OPEN)
    }

    pub(super) fn map_host(&mut self) -> Result<HostBuffer> {
        if self.region.memory_type != MemoryType::Host(Exportability::ByDescriptors) {
            let detail = "its memory is no host memory that can be mapped";
            return Err(Error::new(OPEN, ErrorKind::NoPath, detail));
        }
        let mut file = None;
        self.receive(&mut |descriptor, _, _| {
            file = Some(descriptor);
            Ok(())
        })?;
        let RegionDescriptor { length, rights, .. } = *self.region;
        HostBuffer::open(file.ok_or_else(no_descriptor)?, length, rights.write)
    }

    /// Requests the region, and makes progress until the reply is complete.
    fn receive(&mut self, sink: PieceSink<'_>) -> Result<()> {
        let Some(channel) = self.channel.clone() else {
            let detail = "no descriptor can be passed to this peer";
            return Err(Error::new(OPEN, ErrorKind::NoPath, detail));
        };
        self.exchange(&channel, sink).inspect_err(|_| {
            // The rest of the reply would be taken for the reply to the next request.
            channel.end();
        })?
    }

    /// The outcome of the request, if the whole reply was read.
    fn exchange(&mut self, channel: &Channel, sink: PieceSink<'_>) -> Result<Result<()>> {
        let request = Request::Open(self.region.number, self.region.ticket).encode();
        match channel.send(&request, &[], remaining(self.end)) {
            // No request was sent, so no reply is pending.
            Err(error @ ChannelError::DeadlineExceeded { .. }) => {
                return Ok(Err(error).during(OPEN));
            }
            sent => sent.during(OPEN)?,
        }
        let mut next = 0;
        let mut failure = None;
        loop {
            let message = receive(channel, self.end, self.meanwhile).during(OPEN)?;
            let pieces = match Reply::read_pieces(OPEN, &message) {
                Err(error) if Reply::is_refusal(&message.bytes) => return Ok(Err(error)),
                pieces => pieces?,
            };
            if pieces.number != self.region.number || pieces.first != next {
                return Err(malformed(OPEN, "reply to another request"));
            }
            if pieces.total != self.region.pieces && failure.is_none() {
                let detail = format!(
                    "the region has {} pieces, its descriptor says {}",
                    pieces.total, self.region.pieces
                );
                failure = Some(malformed(OPEN, detail));
            }
            for (descriptor, length) in message.descriptors.into_iter().zip(&pieces.lengths) {
                // The rest of the reply has to be read in any case.
                if failure.is_none() {
                    failure = sink(descriptor, *length, pieces.bytes).err();
                }
            }
            next += pieces.lengths.len() as u32;
            if next >= pieces.total {
                return Ok(failure.map_or(Ok(()), Err));
            }
            if pieces.lengths.is_empty() {
                return Err(malformed(OPEN, "reply without pieces"));
            }
        }
    }
}

fn no_descriptor() -> Error {
    malformed(OPEN, "the reply has no descriptor")
}
