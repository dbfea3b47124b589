//! The network of the two nodes: two network namespaces with a virtual cable between them, or,
//! where that is not permitted, the loopback address.
//!
//! The kernel removes a namespace, and the cable in it, with its last process.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};

use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{getegid, geteuid};

use super::NODES;
use crate::cli::exit::{Exit, Failure, Result};
use command::process::this_program;

/// Interfaces at the ends of the cable.
const INTERFACES: [&str; NODES] = ["cable", "wire"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum NetworkMode {
    /// Network namespaces, or else loopback
    Auto,
    /// Two network namespaces with a cable between them
    Namespaces,
    /// The loopback address
    Loopback,
}

#[derive(Debug)]
pub(super) enum DemoNetwork {
    /// One namespace for each node.
    Namespaces([File; NODES]),
    Loopback {
        /// Why namespaces failed, if they were requested.
        why: Option<String>,
    },
}

impl DemoNetwork {
    /// Creates network namespaces, if requested. Call before starting threads:
    /// unshare(CLONE_NEWUSER) needs a single-threaded process.
    pub(super) fn prepare(network_mode: NetworkMode) -> Result<Self> {
        if network_mode == NetworkMode::Loopback {
            return Ok(Self::Loopback { why: None });
        }
        match probe_in_child().and_then(|()| create_namespaces()) {
            Ok(network) => Ok(network),
            Err(why) if network_mode == NetworkMode::Namespaces => {
                let why = format!("create network namespaces failed: {why}");
                Err(Failure::new(Exit::Denied, why))
            }
            Err(why) => Ok(Self::Loopback { why: Some(why) }),
        }
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Namespaces(_) => "namespaces",
            Self::Loopback { .. } => "loopback",
        }
    }

    pub(super) fn address(&self, node: usize) -> IpAddr {
        let address = match self {
            Self::Namespaces(_) => Ipv4Addr::new(10, 77, 0, node as u8 + 1),
            Self::Loopback { .. } => Ipv4Addr::LOCALHOST,
        };
        address.into()
    }

    /// Moves this thread, and the processes it starts, to the network of a node.
    pub(super) fn enter(&self, node: usize) -> Result<()> {
        let Self::Namespaces(networks) = self else { return Ok(()) };
        setns(&networks[node], CloneFlags::CLONE_NEWNET).map_err(|error| {
            Failure::failed(format!("enter network namespace failed: {}", error.desc()))
        })
    }
}

/// Are namespaces permitted? Tried in a child process, since unshare cannot be undone.
fn probe_in_child() -> Result<(), String> {
    let output = this_program("fabricast")
        .args(["demo", "--probe"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map_err(|error| format!("start a process failed: {error}"))?;
    let why = || String::from_utf8_lossy(&output.stdout).trim().to_owned();
    output.status.success().then_some(()).ok_or_else(why)
}

/// The attempt of the child process.
pub(super) fn probe() -> Result<()> {
    create_namespaces().map(drop).map_err(|why| {
        println!("{why}");
        Failure::silent(Exit::Denied)
    })
}

/// Creates two network namespaces with a cable between them, as root, or as root of a new user
/// namespace. This process is in the second one afterwards.
fn create_namespaces() -> Result<DemoNetwork, String> {
    let (user, group) = (geteuid(), getegid());
    let failed = |error: nix::errno::Errno| format!("unshare: {}", error.desc());
    if unshare(CloneFlags::CLONE_NEWNET).is_err() {
        unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET).map_err(failed)?;
        for (file, content) in [
            ("setgroups", "deny".to_owned()),
            ("uid_map", format!("0 {user} 1")),
            ("gid_map", format!("0 {group} 1")),
        ] {
            std::fs::write(format!("/proc/self/{file}"), content)
                .map_err(|error| format!("write {file} failed: {error}"))?;
        }
    }
    let open = || {
        File::open("/proc/self/ns/net")
            .map_err(|error| format!("open network namespace failed: {error}"))
    };
    let first = open()?;
    unshare(CloneFlags::CLONE_NEWNET).map_err(failed)?;
    let [first_end, second_end] = INTERFACES;
    let target = format!("/proc/{}/fd/{}", std::process::id(), first.as_raw_fd());
    let network = DemoNetwork::Namespaces([first, open()?]);
    ip(&format!("link add {second_end} type veth peer name {first_end}"))?;
    ip(&format!("link set {first_end} netns {target}"))?;
    for (node, end) in INTERFACES.into_iter().enumerate() {
        network.enter(node).map_err(|failure| failure.to_string())?;
        ip("link set lo up")?;
        ip(&format!("address add {}/24 dev {end}", network.address(node)))?;
        ip(&format!("link set {end} up"))?;
    }
    Ok(network)
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip")
        .args(arguments.split(' '))
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("start ip failed: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}
