//! How ranks of several machines meet: by a group they exchange what they have in common, and open rings
//! to each other.

use std::time::{Duration, Instant};

use fabric::Address;
use launch::Group;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::domain_options::JOIN;
use crate::error::{Error, ErrorKind, Result};
use crate::liveness::{LivenessAddress, LivenessListener};
use crate::remote_ranks::RemoteRanks;
use crate::topology::Topology;

/// The largest domain of several machines: each rank has a ring to each other one.
const MAX_RANKS: u32 = 256;

/// What a rank tells all others first.
#[derive(Debug, Serialize, Deserialize)]
struct Introduction {
    /// What all must have in common.
    setup: String,
    address: Address,
    /// Where it is connected to for liveness, if it can be.
    liveness: Option<LivenessAddress>,
}

/// Connects the ranks of a group.
pub(crate) fn connect_ranks(
    group: &mut Group,
    topology: &Topology,
    setup: String,
    deadline: Instant,
) -> Result<RemoteRanks> {
    let own = group.rank();
    let opened = open(group);
    let introduction = opened.as_ref().map(|(remote, address, listener)| {
        let liveness = listener.as_ref().map(LivenessListener::address);
        (remote, Introduction { setup: setup.clone(), address: address.clone(), liveness })
    });
    let introduction = introduction.map(|(_, introduction)| introduction);
    let all = exchange(group, introduction.map_err(ToString::to_string), deadline);
    // The error of this rank says more than what the others learn of it.
    let (mut remote, _, listener) = opened?;
    let all = all?;
    for (found, other) in all.iter().zip(0..) {
        if found.setup != setup {
            let detail = format!(
                "rank {other} has {}, rank {own} has {setup}. Start the same build with the same \
                 options on all ranks",
                found.setup
            );
            let error = Error::new(JOIN, ErrorKind::VersionMismatch, detail);
            return Err(error.of_ranks([other, own]));
        }
    }
    let addresses: Vec<Address> = all.iter().map(|it| it.address.clone()).collect();
    let offers = remote.offer(&addresses).map_err(|error| error.to_string());
    let offers = exchange(group, offers, deadline)?;
    let answers = remote.accept(&offers).map_err(|error| error.to_string());
    let answers = exchange(group, answers, deadline)?;
    let connected = remote.connect(&answers).map_err(|error| error.to_string());
    exchange(group, connected, deadline)?;
    if let Some(listener) = listener {
        let address = |rank: u32| all[rank as usize].liveness;
        let pairs = topology.pairs();
        let to = pairs.iter().filter(|[first, _]| *first == own);
        let to: Vec<_> = to.filter_map(|[_, second]| Some((*second, address(*second)?))).collect();
        let from = pairs.iter().filter(|[_, second]| *second == own);
        let from: Vec<u32> = from.map(|[first, _]| *first).collect();
        remote.watch(listener.connect(own, &to, &from, deadline));
    }
    Ok(remote)
}

type Opened = (RemoteRanks, Address, Option<LivenessListener>);

fn open(group: &Group) -> Result<Opened> {
    let count = group.size();
    let unavailable = |detail: String| Error::new(JOIN, ErrorKind::Unavailable, detail);
    if count > MAX_RANKS {
        let detail = format!("{count} ranks on several machines, at most {MAX_RANKS}");
        return Err(unavailable(detail));
    }
    let Some(offer) = group.fabric_offer() else {
        let detail = "the ranks are on several machines, and the group uses no fabric. Start it with \
                      FabricUse::BetweenMachines";
        return Err(unavailable(detail.to_owned()));
    };
    let failed = |error| Error::caused_by(JOIN, ErrorKind::Failed, error);
    let remote = RemoteRanks::open(offer, group.rank(), count as usize).map_err(failed)?;
    let address = remote.address().map_err(failed)?;
    let listener = group.address().ok().and_then(|address| LivenessListener::new(address).ok());
    Ok((remote, address, listener))
}

/// What all ranks contribute, or the same error on all.
pub(crate) fn exchange<T: Serialize + DeserializeOwned>(
    group: &mut Group,
    own: std::result::Result<T, String>,
    deadline: Instant,
) -> Result<Vec<T>> {
    let bytes = control::codec::encode(0, &own);
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let all = group.all_gather(&bytes, left).map_err(|error| {
        let kind = match error.kind() {
            launch::ErrorKind::DeadlineExceeded => ErrorKind::DeadlineExceeded,
            launch::ErrorKind::RankFailed => ErrorKind::RankFailed,
            _ => ErrorKind::Failed,
        };
        let ranks = error.ranks().to_vec();
        Error::caused_by(JOIN, kind, error).of_ranks(ranks)
    })?;
    let found = all.iter().zip(0..).map(|(bytes, rank)| {
        let found: std::result::Result<T, String> =
            control::codec::decode(0, bytes).map_err(|error| {
                let detail = format!("rank {rank} sent what is not valid here: {error}");
                Error::new(JOIN, ErrorKind::VersionMismatch, detail).of_ranks([rank])
            })?;
        found.map_err(|cause| {
            let detail = format!("rank {rank} cannot take part: {cause}");
            Error::new(JOIN, ErrorKind::Failed, detail).of_ranks([rank])
        })
    });
    found.collect()
}
