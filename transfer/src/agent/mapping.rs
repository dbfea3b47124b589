//! Regions of other processes of this machine, mapped into this process.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use gpu::{Device, LegacyHandle, Memory};
use ipc::{Channel, ChannelError};

use super::peer::{ProgressCallback, of_channel, receive, remaining};
use super::protocol::{Reply, Request};
use super::{Agent, BUSY_PAUSE};
use crate::error::{Error, ErrorKind, Result};
use crate::host_buffer::HostBuffer;
use crate::path::{Exportability, MemoryType};
use crate::region::RegionDescriptor;
use crate::share::check_device;

const OPEN: &str = "open a region";
/// The longest wait between polls while no operation is in flight.
const IDLE_PAUSE: Duration = Duration::from_millis(20);

/// Receives each piece of a region: descriptor, length, and the bytes of all pieces.
type PieceSink<'a> = &'a mut dyn FnMut(OwnedFd, u64, u64) -> Result<()>;

impl Agent {
    /// Makes progress during a wait. Returns how long the wait may last without it.
    pub(super) fn progress_while_waiting(&mut self) -> Duration {
        self.progress();
        if self.operations.in_flight > 0 { BUSY_PAUSE } else { IDLE_PAUSE }
    }

    /// Maps a peer's region for a device of this process, once.
    pub(super) fn map_for(
        &mut self,
        peer: u32,
        region: &RegionDescriptor,
        device: &Device,
        end: Instant,
    ) -> Result<Memory> {
        if let Some(memory) = self.peer(peer, OPEN)?.mapped(region.number, device.name()) {
            return Ok(memory);
        }
        let memory = match region.memory_type {
            MemoryType::Device(Exportability::ByDescriptors) => {
                self.import(peer, region, device, end)?
            }
            MemoryType::Device(Exportability::ByLegacyHandle) => {
                self.import_legacy(peer, region, device, end)?
            }
            _ => {
                let detail = "its memory is no device memory that can be mapped";
                return Err(Error::new(OPEN, ErrorKind::NoPath, detail));
            }
        };
        self.peer(peer, OPEN)?.cache_mapping(region.number, &memory);
        Ok(memory)
    }

    fn import(
        &mut self,
        peer: u32,
        region: &RegionDescriptor,
        device: &Device,
        end: Instant,
    ) -> Result<Memory> {
        let of_device = |error| Error::of_device(OPEN, error);
        let mut importer = None;
        self.request_region(peer, region, end, &mut |descriptor, length, bytes| {
            // The last piece may be much longer than the region's part of it.
            let importer = match &mut importer {
                Some(importer) => importer,
                none => none.insert(device.importer(bytes).map_err(of_device)?),
            };
            importer.add(descriptor.as_fd(), length).map_err(of_device)
        })?;
        let Some(importer) = importer else {
            return Err(Error::new(OPEN, ErrorKind::Malformed, "the reply has no descriptor"));
        };
        let memory = importer.finish(region.offset, region.length).map_err(of_device)?;
        check_device(OPEN, &memory, region.device)?;
        Ok(memory)
    }

    fn import_legacy(
        &mut self,
        peer: u32,
        region: &RegionDescriptor,
        device: &Device,
        end: Instant,
    ) -> Result<Memory> {
        // The reply has no pieces, but it reports whether the region exists.
        self.request_region(peer, region, end, &mut |_, _, _| Ok(()))?;
        let Some(bytes) = region.legacy else {
            return Err(Error::new(
                OPEN,
                ErrorKind::Malformed,
                "the descriptor has no legacy handle",
            ));
        };
        let handle = LegacyHandle { bytes, offset: region.offset, length: region.length };
        // For memory opened by legacy handle the driver reports the opening device: nothing to
        // compare.
        device.open_legacy_handle(&handle).map_err(|error| Error::of_device(OPEN, error))
    }

    /// Maps a peer's region of host memory, once.
    pub(super) fn map_host(
        &mut self,
        peer: u32,
        region: &RegionDescriptor,
        end: Instant,
    ) -> Result<HostBuffer> {
        let is_writable = region.rights.write;
        if let Some(buffer) = self.peer(peer, OPEN)?.mapped_host(region.number, is_writable) {
            return Ok(buffer);
        }
        if region.memory_type != MemoryType::Host(Exportability::ByDescriptors) {
            let detail = "its memory is no host memory that can be mapped";
            return Err(Error::new(OPEN, ErrorKind::NoPath, detail));
        }
        let mut file = None;
        self.request_region(peer, region, end, &mut |descriptor, _, _| {
            file = Some(descriptor);
            Ok(())
        })?;
        let Some(file) = file else {
            return Err(Error::new(OPEN, ErrorKind::Malformed, "the reply has no descriptor"));
        };
        let buffer = HostBuffer::open(file, region.length, is_writable)?;
        self.peer(peer, OPEN)?.cache_host_mapping(region.number, buffer.clone());
        Ok(buffer)
    }

    /// Requests a region, and makes progress until the reply is complete.
    fn request_region(
        &mut self,
        peer: u32,
        region: &RegionDescriptor,
        end: Instant,
        sink: PieceSink<'_>,
    ) -> Result<()> {
        let Some(channel) = self.peer(peer, OPEN)?.channel() else {
            return Err(Error::new(
                OPEN,
                ErrorKind::NoPath,
                "no descriptor can be passed to this peer",
            ));
        };
        let outcome = exchange(&channel, region, end, sink, &mut || self.progress_while_waiting());
        outcome.unwrap_or_else(|error| {
            // The rest of the reply would be taken for the reply to the next request.
            channel.end();
            if let Some(local_session) = &mut self.peer(peer, OPEN)?.local_session {
                local_session.refresh();
            }
            Err(error)
        })
    }
}

/// The outcome of the request, if the whole reply was read.
fn exchange(
    channel: &Channel,
    region: &RegionDescriptor,
    end: Instant,
    sink: PieceSink<'_>,
    meanwhile: ProgressCallback<'_>,
) -> Result<Result<()>> {
    let request = Request::Open(region.number, region.ticket).encode();
    match channel.send(&request, &[], remaining(end)) {
        // No request was sent, so no reply is pending.
        Err(error @ ChannelError::DeadlineExceeded { .. }) => {
            return Ok(Err(of_channel(OPEN)(error)));
        }
        sent => sent.map_err(of_channel(OPEN))?,
    }
    let mut next = 0;
    let mut failure = None;
    loop {
        let message = receive(channel, end, meanwhile).map_err(of_channel(OPEN))?;
        let pieces = match Reply::read_pieces(OPEN, &message) {
            Err(error) if Reply::is_refusal(&message.bytes) => return Ok(Err(error)),
            pieces => pieces?,
        };
        if pieces.number != region.number || pieces.first != next {
            let detail = "reply to another request";
            return Err(Error::new(OPEN, ErrorKind::Malformed, detail));
        }
        if pieces.total != region.pieces && failure.is_none() {
            let detail = format!(
                "the region has {} pieces, its descriptor says {}",
                pieces.total, region.pieces
            );
            failure = Some(Error::new(OPEN, ErrorKind::Malformed, detail));
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
            return Err(Error::new(OPEN, ErrorKind::Malformed, "reply without pieces"));
        }
    }
}
