//! Pieces on devices that the service does not see (`CUDA_VISIBLE_DEVICES`): a client that sees the
//! device makes them.
//!
//! A client that refuses, ends or does not answer in time is followed by another one. If none is
//! left, the publisher requests memory again.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use ipc::{Caller, Participant};

use super::Broker;
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::On;
use crate::pool::PoolId;
use crate::service::process::is_stopped;
use crate::service::protocol::{Notice, Refusal};
use crate::settings::SharedLocation;

/// How long a client may take to make a piece.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Devices that a client may report.
const MAX_DEVICES: usize = 64;
/// No device has more memory. A false report must not make a pool that cannot be mapped.
const MAX_DEVICE_MEMORY: u64 = 1 << 44;

/// A piece that a client is to make.
#[derive(Debug)]
struct PieceRequest {
    number: usize,
    length: u64,
    client: Participant,
    since: Instant,
    /// Clients that did not make it.
    failed: BTreeSet<Participant>,
}

/// The requested pieces, at most one of each pool.
#[derive(Debug, Default)]
pub(super) struct PieceRequests(HashMap<PoolId, PieceRequest>);

impl PieceRequests {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Broker {
    /// A client sees a device, and can make pieces there.
    pub(crate) fn add_device(&mut self, member: Participant, device: [u8; 16], memory: u64) {
        if let Some(client) = self.clients.get_mut(&member)
            && client.devices.len() < MAX_DEVICES
        {
            let memory = memory.min(MAX_DEVICE_MEMORY);
            client.devices.insert(SharedLocation::Device(device), memory);
        }
    }

    /// The memory of a device, as a client reports it.
    pub(super) fn device_memory(&self, place: SharedLocation) -> Option<u64> {
        self.clients.values().find_map(|client| client.devices.get(&place).copied())
    }

    /// Requests a piece of a client. Does nothing if one of the pool is requested already.
    pub(super) fn request_piece(&mut self, id: PoolId, number: usize, length: u64) -> Result<()> {
        if self.piece_requests.0.contains_key(&id) {
            return Ok(());
        }
        self.request_piece_except(id, number, length, BTreeSet::new())
    }

    fn request_piece_except(
        &mut self,
        id: PoolId,
        number: usize,
        length: u64,
        failed: BTreeSet<Participant>,
    ) -> Result<()> {
        let may_make = self.clients.iter_mut().find(|(member, client)| {
            client.devices.contains_key(&id.place)
                && client.pools.contains_key(&id)
                && !client.is_leaving
                && !failed.contains(member)
                && !is_stopped(client.name.process)
        });
        let Some((member, client)) = may_make else {
            let detail = "neither the node's service nor a process that uses the topic sees the \
                          device, or could make memory there. Keep the topic open in a process that \
                          sees it, or serve the node by \"fabricast node\", started where all devices \
                          are visible";
            return Err(Error::new("grow pool", ErrorKind::NoDevice, detail)).on(id);
        };
        let notice = Notice::MakePiece { pool: id, number: number as u32, length };
        client.connection.send(&notice, Vec::new());
        let (client, since) = (*member, Instant::now());
        self.piece_requests.0.insert(id, PieceRequest { number, length, client, since, failed });
        Ok(())
    }

    /// A client has sent pieces of a pool: distributes the requested one.
    pub(crate) fn accept_piece(&mut self, caller: &Caller<'_>, member: Participant, id: PoolId) {
        if self.piece_requests.0.get(&id).is_none_or(|request| request.client != member) {
            return;
        }
        let Some(PieceRequest { number, .. }) = self.piece_requests.0.remove(&id) else { return };
        // Unless the piece contradicts those that the pool has.
        if self.registry.pool(id).is_some_and(|pool| pool.held() > number) {
            self.distribute_piece(caller, id, number);
        }
    }

    /// A client did not make a requested piece.
    pub(crate) fn refuse_piece(&mut self, member: Participant, id: PoolId, reason: Refusal) {
        if self.piece_requests.0.get(&id).is_some_and(|request| request.client == member) {
            let error = reason.into_error("create piece of pool");
            tracing::warn!(%error, pool = %id, %member, "a process did not make memory of a device");
            self.request_from_another(id);
        }
    }

    /// Requests the pieces that were not made in time from other clients.
    pub(super) fn check_piece_requests(&mut self) {
        let is_over = |request: &PieceRequest| {
            request.since.elapsed() >= ANSWER_TIMEOUT || !self.clients.contains_key(&request.client)
        };
        let over = self.piece_requests.0.iter().filter(|(_, request)| is_over(request));
        for id in over.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.request_from_another(id);
        }
    }

    fn request_from_another(&mut self, id: PoolId) {
        let Some(request) = self.piece_requests.0.remove(&id) else { return };
        let PieceRequest { number, length, client, mut failed, .. } = request;
        failed.insert(client);
        if let Err(error) = self.request_piece_except(id, number, length, failed) {
            tracing::warn!(%error, "a pool cannot grow");
        }
    }
}
