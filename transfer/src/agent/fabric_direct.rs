//! Requests to peers for direct access of a fabric to device memory, before regions are joined.

use std::time::{Duration, Instant};

use super::explain::{self, EXPLAIN, MemoryAttributes};
use super::remote_transport::{DirectAccess, DirectKeys, RemoteTransport};
use super::{Agent, PeerId};
use crate::device_memory::{LocalEnd, MemoryEnd};
use crate::error::Result;
use crate::path::{Fabric, Facts, Operation, Path, Policy, Probe, Registration, choose};
use crate::region::{Buffer, RegionDescriptor};
use crate::share::check_fork;

impl Agent {
    /// Probes whether the fabric accesses device memory itself between local memory of this kind and
    /// a peer's region, as [joining](Self::join) such memory does, so that
    /// [`explain`](Self::explain) knows the outcome. Does nothing if it is known, or if another
    /// reason prevents direct transfers. Needs [connected fabrics](Self::connect_fabrics).
    ///
    /// # Errors
    /// [`Unknown`](crate::ErrorKind::Unknown) peer; [`Stale`](crate::ErrorKind::Stale) region;
    /// [`NoSuchDevice`](crate::ErrorKind::NoSuchDevice) if the local memory is on a device that this
    /// process does not see; [`Malformed`](crate::ErrorKind::Malformed);
    /// [`DeadlineExceeded`](crate::ErrorKind::DeadlineExceeded). A probe that fails is not an error
    /// here: `explain` reports it as a reason.
    pub fn probe_fabric(
        &mut self,
        peer: PeerId,
        local: &MemoryAttributes,
        descriptor: &[u8],
        timeout: Duration,
    ) -> Result<()> {
        check_fork(self.fork_generation, EXPLAIN)?;
        let end = ipc::deadline(timeout);
        let remote = RegionDescriptor::decode(descriptor)?;
        let label = self.peers.label(peer.0);
        let probed = self.probe_by_fabric(peer.0, local, &remote, end);
        probed.map_err(|error| error.with(label))
    }

    fn probe_by_fabric(
        &mut self,
        number: u32,
        local: &MemoryAttributes,
        remote: &RegionDescriptor,
        end: Instant,
    ) -> Result<()> {
        self.peers.get(number, EXPLAIN)?.check_owner(remote)?;
        if !self.remote_transport.is_connected(number) {
            return Ok(());
        }
        let Some(local_end) = local.local_end()? else { return Ok(()) };
        let (by, device) = ((number, &self.peers), local.local_device()?);
        let ends = (local, &remote.into());
        let found = (device, self.copy_service_state(number));
        let (facts, _) = explain::facts(Operation::Put, ends, found, by, &self.remote_transport)?;
        let policy = Policy { require: vec![Path::FabricDirect], ..Policy::default() };
        if may_be_direct(&facts, &policy) {
            self.request_direct_access(number, &local_end, remote, end)?;
        }
        Ok(())
    }

    /// Before a join: asks the peer for direct access if the path would be direct with it, and adds
    /// the answer to the facts. Returns the keys of the peer's memory, if any.
    pub(super) fn prepare_direct(
        &mut self,
        number: u32,
        local: &Buffer,
        remote: &RegionDescriptor,
        (facts, policy): (&mut Facts, &Policy),
        end: Instant,
    ) -> Result<Option<DirectKeys>> {
        if !may_be_direct(facts, policy) {
            return Ok(None);
        }
        let Fabric::Connected {
            local: local_registration, remote: remote_registration, probe, ..
        } = &mut facts.fabric
        else {
            return Ok(None);
        };
        let local = match LocalEnd::of(local) {
            Ok(local) => local,
            Err(obstacle) => {
                *local_registration = obstacle;
                return Ok(None);
            }
        };
        match self.request_direct_access(number, &local, remote, end)? {
            DirectAccess::Granted(keys, outcome) => {
                *probe = outcome;
                return Ok(Some(keys));
            }
            DirectAccess::Refused(cause) => *remote_registration = Registration::Refused { cause },
            DirectAccess::Failed(cause) => *probe = Probe::Failed { cause },
        }
        Ok(None)
    }

    /// Opens a region, and waits for the answers to the requests for direct access.
    fn request_direct_access(
        &mut self,
        number: u32,
        local: &LocalEnd,
        remote: &RegionDescriptor,
        end: Instant,
    ) -> Result<DirectAccess> {
        let Some(remote_end) = MemoryEnd::of(remote.memory_type, remote.device) else {
            let cause = "no fabric accesses memory of its kind".to_owned();
            return Ok(DirectAccess::Refused(cause));
        };
        self.connect_by_rails(number, end)?;
        let opening = self.remote_transport.begin_open(number, None, remote, None)?;
        self.wait_for_links(end, RemoteTransport::open_counts);
        self.remote_transport.finish_open(opening)?;
        let requesting =
            self.remote_transport.request_direct(number, local, remote, remote_end, end);
        self.wait_for_links(requesting.until(), RemoteTransport::direct_counts);
        Ok(self.remote_transport.finish_direct(requesting))
    }
}

/// Would the fabric access the memories itself, device memory among them, if the peer grants it and
/// probed transfers are right?
fn may_be_direct(facts: &Facts, policy: &Policy) -> bool {
    let mut granted = facts.clone();
    let Fabric::Connected { probe, .. } = &mut granted.fabric else { return false };
    let before = std::mem::replace(probe, Probe::Passed);
    matches!(before, Probe::NotMade | Probe::Passed | Probe::Skipped)
        && facts.has_device_memory()
        && choose(&granted, policy).taken() == Some(Path::FabricDirect)
}
