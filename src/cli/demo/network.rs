//! Where the two nodes are: in two network namespaces with a cable between them, or, where that
//! is not permitted, on the loopback address.
//!
//! Nothing of it has to be removed: a namespace, and the cable in it, goes with the last process
//! that is there.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};

use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{getegid, geteuid};

use super::scenario::NODES;
use crate::cli::exit::{Exit, Failure};
use command::process::this_program;

/// The ends of the cable.
const INTERFACES: [&str; NODES] = ["cable", "wire"];

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum NetworkMode {
    /// Network namespaces, or else loopback
    Auto,
    /// Two network namespaces with a cable between them
    Namespaces,
    /// The loopback address
    Loopback,
}

/// Where they are.
#[derive(Debug)]
pub(super) enum DemoNetwork {
    /// One for each node.
    Namespaces([File; NODES]),
    Loopback {
        /// Why there are no namespaces, if they were wanted.
        why: Option<String>,
    },
}

impl DemoNetwork {
    /// Makes network namespaces, if these are to be. Before this process has other threads: who has
    /// some cannot go into a user namespace.
    pub(super) fn prepare(network_mode: NetworkMode) -> Result<Self, Failure> {
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

    /// Where a node is.
    pub(super) fn address(&self, node: usize) -> IpAddr {
        let address = match self {
            Self::Namespaces(_) => Ipv4Addr::new(10, 77, 0, node as u8 + 1),
            Self::Loopback { .. } => Ipv4Addr::LOCALHOST,
        };
        address.into()
    }

    /// Takes this thread, and what it starts, to where a node is.
    pub(super) fn enter(&self, node: usize) -> Result<(), Failure> {
        let Self::Namespaces(networks) = self else { return Ok(()) };
        let gone = setns(&networks[node], CloneFlags::CLONE_NEWNET);
        gone.map_err(|error| {
            Failure::failed(format!("enter network namespace failed: {}", error.desc()))
        })
    }
}

/// Is all permitted that it takes? Tried by another process, since there is no way back.
fn probe_in_child() -> Result<(), String> {
    let output = this_program("fabricast")
        .args(["demo", "--probe"])
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
pub(super) fn probe() -> Result<(), Failure> {
    create_namespaces().map(drop).map_err(|why| {
        println!("{why}");
        Failure::silent(Exit::Denied)
    })
}

/// Makes two networks, as root, or as root of a user namespace, with a cable between them. This
/// process is in one of them afterwards.
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
                .map_err(|error| format!("writing {file}: {error}"))?;
        }
    }
    let here =
        || File::open("/proc/self/ns/net").map_err(|error| format!("opening a network: {error}"));
    let first = here()?;
    unshare(CloneFlags::CLONE_NEWNET).map_err(failed)?;
    let [its, mine] = INTERFACES;
    let there = format!("/proc/{}/fd/{}", std::process::id(), first.as_raw_fd());
    let network = DemoNetwork::Namespaces([first, here()?]);
    ip(&format!("link add {mine} type veth peer name {its}"))?;
    ip(&format!("link set {its} netns {there}"))?;
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
        .map_err(|error| format!("starting ip: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(format!("ip {arguments}: {}", said.trim()))
        }
    }
}
