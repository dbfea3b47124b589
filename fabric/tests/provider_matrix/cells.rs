//! The cells of the matrix.

use std::fmt;
use std::str::FromStr;

use fabric::{Caps, EndpointKind, Offer, Query, Result};

/// One provider with one endpoint type.
pub struct Group {
    pub provider: &'static str,
    pub kind: EndpointKind,
    /// Local address to bind to, for providers with IP addresses.
    pub source: Option<&'static str>,
    /// Environment variables that the provider needs.
    pub environment: &'static [(&'static str, &'static str)],
    /// Do two-sided messages arrive? They do not on `ofi_mrail` 1.17 (libfabric's own
    /// `fi_pingpong` hangs there, too), so pairs skip the message of their first exchange.
    pub messages: bool,
}

const LOOPBACK: Option<&str> = Some("127.0.0.1");

const fn group(provider: &'static str, kind: EndpointKind, source: Option<&'static str>) -> Group {
    Group { provider, kind, source, environment: &[], messages: true }
}

pub const GROUPS: &[Group] = &[
    group("tcp", EndpointKind::Rdm, LOOPBACK),
    group("tcp", EndpointKind::Msg, LOOPBACK),
    group("net", EndpointKind::Rdm, LOOPBACK),
    group("net", EndpointKind::Msg, LOOPBACK),
    group("tcp;ofi_rxm", EndpointKind::Rdm, LOOPBACK),
    group("shm", EndpointKind::Rdm, None),
    group("udp;ofi_rxd", EndpointKind::Rdm, LOOPBACK),
    group("sockets", EndpointKind::Rdm, LOOPBACK),
    group("sockets", EndpointKind::Msg, LOOPBACK),
    Group {
        provider: "net;ofi_rxm;ofi_mrail",
        kind: EndpointKind::Rdm,
        source: None,
        environment: &[("FI_OFI_MRAIL_ADDR", "127.0.0.1")],
        messages: false,
    },
    Group {
        provider: "tcp;ofi_rxm;ofi_mrail",
        kind: EndpointKind::Rdm,
        source: None,
        environment: &[("FI_OFI_MRAIL_ADDR", "127.0.0.1")],
        messages: false,
    },
    Group {
        provider: "verbs",
        kind: EndpointKind::Msg,
        source: None,
        environment: NO_REGISTRATION_CACHE,
        messages: true,
    },
    Group {
        provider: "verbs;ofi_rxm",
        kind: EndpointKind::Rdm,
        source: None,
        environment: NO_REGISTRATION_CACHE,
        messages: true,
    },
];

/// The verbs provider's registration cache widens the access of regions and leaves closed ones
/// open to peers.
const NO_REGISTRATION_CACHE: &[(&str, &str)] = &[("FI_MR_CACHE_MAX_COUNT", "0")];

/// Kind of memory of the payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memory {
    Host,
    Cuda,
}

pub const MEMORIES: &[Memory] = &[Memory::Host, Memory::Cuda];

impl Memory {
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
        }
    }
}

/// One case on one provider.
#[derive(Clone)]
pub struct Cell {
    pub provider: String,
    pub kind: EndpointKind,
    pub memory: Memory,
    pub case: String,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}/{}", self.provider, kind_name(self.kind), self.memory.name(), self.case)
    }
}

impl FromStr for Cell {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let parts: Vec<&str> = text.split('/').collect();
        let [provider, kind, memory, case] = parts[..] else {
            return Err(format!("\"{text}\" is not provider/endpoint/memory/case"));
        };
        let kind = match kind {
            "rdm" => EndpointKind::Rdm,
            "msg" => EndpointKind::Msg,
            other => return Err(format!("endpoint type {other}")),
        };
        let memory = MEMORIES
            .iter()
            .copied()
            .find(|m| m.name() == memory)
            .ok_or_else(|| format!("memory {memory}"))?;
        Ok(Self { provider: provider.to_owned(), kind, memory, case: case.to_owned() })
    }
}

pub fn kind_name(kind: EndpointKind) -> &'static str {
    match kind {
        EndpointKind::Rdm => "rdm",
        EndpointKind::Msg => "msg",
        EndpointKind::Datagram => "dgram",
    }
}

impl Cell {
    /// Same provider, endpoint type and memory.
    pub fn is_same_group(&self, other: &Self) -> bool {
        (&self.provider, self.kind, self.memory) == (&other.provider, other.kind, other.memory)
    }

    pub fn group(&self) -> Option<&'static Group> {
        GROUPS.iter().find(|g| g.provider == self.provider && g.kind == self.kind)
    }

    /// The query for this cell's provider.
    pub fn query(&self) -> Query {
        let mut query = Query::new(self.kind).provider(&self.provider);
        if let Some(source) = self.group().and_then(|g| g.source) {
            query = query.source(source);
        }
        query
    }

    /// This cell's offer, with these capabilities in addition to messages and RMA.
    pub fn offer(&self, extra: Caps) -> Result<Offer> {
        self.offer_of(self.query(), extra)
    }

    pub fn offer_of(&self, query: Query, extra: Caps) -> Result<Offer> {
        let mut caps = Caps::MESSAGE | Caps::RMA | extra;
        if self.memory == Memory::Cuda {
            caps |= Caps::DEVICE_MEMORY;
        }
        query.caps(caps).first()
    }
}
