//! Where the two nodes are: in two network namespaces with a cable between them, or, where that
//! is not permitted, on the loopback address.
//!
//! Nothing of it has to be removed: a namespace, and the cable in it, goes with the last process
//! that is there.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};

use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{getegid, geteuid};
use serde::{Deserialize, Serialize};

use super::worker::program;
use crate::cli::exit::{Exit, Failure};

/// The ends of the cable.
const ENDS: [&str; 2] = ["cable", "wire"];

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Between {
    /// Network namespaces, or else loopback
    Auto,
    /// Two network namespaces with a cable between them
    Namespaces,
    /// The loopback address
    Loopback,
}

/// Where they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ground {
    Namespaces,
    Loopback {
        /// Why there are no namespaces, if they were wanted.
        why: Option<String>,
    },
}

/// Where a process is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Place {
    /// Where the one is that started it.
    Here,
    /// In a network that it makes.
    Separate,
    /// In the network of this process.
    With(u32),
}

/// The address of a node.
fn address(node: usize) -> IpAddr {
    Ipv4Addr::new(10, 77, 0, node as u8 + 1).into()
}

impl Ground {
    /// Goes into a network namespace, if that is to be. Before this process has other threads:
    /// who has some cannot go into a user namespace.
    pub(super) fn prepare(between: Between) -> Result<Self, Failure> {
        if between == Between::Loopback {
            return Ok(Self::Loopback { why: None });
        }
        match attempt().and_then(|()| separate()).and_then(|()| lay_cable()) {
            Ok(()) => Ok(Self::Namespaces),
            Err(why) if between == Between::Namespaces => {
                let why = format!("no network namespaces can be made here: {why}");
                Err(Failure::new(Exit::Denied, why))
            }
            Err(why) => Ok(Self::Loopback { why: Some(why) }),
        }
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Namespaces => "namespaces",
            Self::Loopback { .. } => "loopback",
        }
    }

    /// Where the processes of a node are, given its service.
    pub(super) fn place(&self, node: usize, service: Option<u32>) -> Place {
        match (self, node, service) {
            (Self::Loopback { .. }, ..) | (_, 0, _) => Place::Here,
            (Self::Namespaces, _, None) => Place::Separate,
            (Self::Namespaces, _, Some(process)) => Place::With(process),
        }
    }

    /// Where the service of a node listens.
    pub(super) fn listen(&self, node: usize) -> SocketAddr {
        let address = match self {
            Self::Namespaces => address(node),
            Self::Loopback { .. } => Ipv4Addr::LOCALHOST.into(),
        };
        SocketAddr::new(address, 0)
    }

    /// Gives the network of that process the other end of the cable.
    pub(super) fn connect(&self, process: u32) -> Result<(), Failure> {
        ip(&format!("link set {} netns {process}", ENDS[1])).map_err(Failure::failed)
    }
}

/// With the first node at its end.
fn lay_cable() -> Result<(), String> {
    let [mine, its] = ENDS;
    ip(&format!("link add {mine} type veth peer name {its}"))?;
    plug(0)
}

/// Makes this end of the cable usable.
fn plug(node: usize) -> Result<(), String> {
    let end = ENDS[node];
    ip("link set lo up")?;
    ip(&format!("address add {}/24 dev {end}", address(node)))?;
    ip(&format!("link set {end} up"))
}

/// The other end, in the network that was separated.
pub(super) fn plug_in() -> Result<(), Failure> {
    plug(1).map_err(Failure::failed)
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip")
        .args(arguments.split(' '))
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("starting ip: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(format!("ip {arguments}: {}", said.trim()))
        }
    }
}

/// Is all permitted that it takes? Tried by another process, since there is no way back.
fn attempt() -> Result<(), String> {
    let output = program("probe")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map_err(|error| format!("starting a process: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
    }
}

/// What the other process tries.
pub(super) fn probe() -> Result<(), String> {
    separate()?;
    lay_cable()?;
    // As the second node does.
    unshare(CloneFlags::CLONE_NEWNET).map_err(|error| format!("unshare: {}", error.desc()))
}

/// Takes this process to a network of its own: as root, or as root of a user namespace.
pub(super) fn separate() -> Result<(), String> {
    let (user, group) = (geteuid(), getegid());
    if unshare(CloneFlags::CLONE_NEWNET).is_ok() {
        return Ok(());
    }
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET)
        .map_err(|error| format!("unshare: {}", error.desc()))?;
    for (file, content) in [
        ("setgroups", "deny".to_owned()),
        ("uid_map", format!("0 {user} 1")),
        ("gid_map", format!("0 {group} 1")),
    ] {
        std::fs::write(format!("/proc/self/{file}"), content)
            .map_err(|error| format!("writing {file}: {error}"))?;
    }
    Ok(())
}

/// Takes this process to the network of that one.
pub(super) fn follow(process: u32) -> Result<(), Failure> {
    let failed = |why: &str| Failure::failed(format!("the network of process {process}: {why}"));
    let network = File::open(format!("/proc/{process}/ns/net"));
    let network = network.map_err(|error| failed(&error.to_string()))?;
    setns(network, CloneFlags::CLONE_NEWNET).map_err(|error| failed(error.desc()))
}
