//! Topics among the ranks of a job: one node for each machine.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use control::launcher::{Error, ErrorKind, Result};
use pubsub::{NetworkOptions, Node, NodeOptions, Row};

use super::Group;
use crate::job_directory::JobDirectory;
use crate::messenger::CallDeadline;

const JOIN: &str = "join node of job";

impl Group {
    /// Joins the node of this job on this machine: its topics are those of the job, and other jobs
    /// do not see them. Nodes of different machines are connected, and messages that a machine's
    /// ranks subscribe to travel there once. All ranks call it once.
    ///
    /// The group sets the directory and, between machines, addresses, peers and providers; the rest of
    /// the options is used. The first rank of each machine serves the node while it runs, then
    /// another one does. Drop the node before the group, which removes its directory.
    ///
    /// When it returns, the nodes of all machines are connected. A barrier after it makes the
    /// subscribers of a machine known to its publishers. Other machines learn of them shortly after:
    /// [`Node::report`] then has a [`Row::Sent`] for each.
    ///
    /// ```
    /// use std::time::Duration;
    /// use launch::Group;
    /// use pubsub::{NodeOptions, TopicSettings};
    /// let timeout = Duration::from_secs(10);
    /// let mut group = Group::start()?;
    /// let node = group.node(NodeOptions::default(), timeout)?;
    /// let topic = node.topic("field", &TopicSettings::default())?;
    /// let mut subscriber = topic.subscriber()?;
    /// group.barrier(timeout)?; // all subscribe before the first message
    /// if group.rank() == 0 {
    ///     topic.publisher()?.push(b"step 1", timeout)?;
    /// }
    /// assert_eq!(subscriber.pull(timeout)?.to_vec()?, b"step 1");
    /// group.barrier(timeout)?; // all have it before one ends
    /// drop((subscriber, topic, node));
    /// group.close(timeout)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// On all ranks the error of a rank that cannot join, with that rank. Ranks of several machines
    /// need [consent](crate::GroupOptions::insecure).
    pub fn node(&mut self, options: NodeOptions, timeout: Duration) -> Result<Node> {
        let deadline = CallDeadline::new(JOIN, timeout);
        let directory = JobDirectory::new(self.options.directory_path(), self.exchange.job());
        let mut options = NodeOptions { directory: directory.path().to_owned(), ..options };
        self.node_directory = Some(directory);
        let is_first = self.ranks.is_first_of_machine(self.rank());
        let others = self.machines() - 1;
        let network = options.network.take();
        // A service that does not answer fails this rank before the others give it up.
        options.service_timeout = options.service_timeout.min(timeout / 2);
        let (mut node, mut rendezvous) = (None, None);
        if others > 0 {
            let (of_root, address) = self.join_root(&options, network.clone(), deadline)?;
            (node, rendezvous) = (of_root, Some(address));
        }
        // The first rank of each machine serves it; the others join afterwards.
        for is_turn in [is_first, !is_first] {
            let joined = match (is_turn, node.take()) {
                (true, None) => {
                    let network = match rendezvous.clone() {
                        Some(address) => self.network(network.clone(), Some(address)).map(Some),
                        None => Ok(network.clone()),
                    };
                    network
                        .map(|network| NodeOptions { network, ..options.clone() })
                        .and_then(|options| Node::join(options).map_err(failed))
                        .map(Some)
                }
                // All nodes have been joined, and become connected.
                (false, Some(node)) if others > 0 => {
                    wait_for_nodes(&node, others, deadline).map(|()| Some(node))
                }
                (_, node) => Ok(node),
            };
            let text = joined.as_ref().err().map_or(String::new(), ToString::to_string);
            let texts = self.all_gather(text.as_bytes(), deadline.left())?;
            if let Some((text, rank)) = texts.iter().zip(0..).find(|(text, _)| !text.is_empty()) {
                return Err(rank_failed(rank, &String::from_utf8_lossy(text)));
            }
            node = joined?;
        }
        node.ok_or_else(|| Error::new(JOIN, ErrorKind::Failed, "this rank did not join"))
    }

    /// Rank 0 joins its node. Returns it there, and on all ranks the address at which it listens.
    fn join_root(
        &mut self,
        options: &NodeOptions,
        network: Option<NetworkOptions>,
        deadline: CallDeadline,
    ) -> Result<(Option<Node>, String)> {
        let joined = match self.rank() {
            0 => self.network(network, None).and_then(|network| {
                join_and_listen(NodeOptions { network: Some(network), ..options.clone() })
            }),
            _ => Ok((None, String::new())),
        };
        let answer = match &joined {
            Ok((_, address)) => Ok(address.clone()),
            Err(error) => Err(error.to_string()),
        };
        let bytes = postcard::to_allocvec(&answer).map_err(failed)?;
        let bytes = self.broadcast(0, &bytes, deadline.left())?;
        let (node, _) = joined?;
        let answer: std::result::Result<String, String> = postcard::from_bytes(&bytes)
            .map_err(|error| Error::caused_by(JOIN, ErrorKind::Malformed, error))?;
        Ok((node, answer.map_err(|text| rank_failed(0, &text))?))
    }

    fn network(
        &self,
        options: Option<NetworkOptions>,
        rendezvous: Option<String>,
    ) -> Result<NetworkOptions> {
        if !self.options.is_insecure() {
            let detail = "nodes of several machines are not authenticated or encrypted yet. To allow \
                          this: GroupOptions::insecure";
            return Err(Error::new(JOIN, ErrorKind::InvalidArgument, detail));
        }
        let address = self.own_address(JOIN)?;
        let options = options.unwrap_or_default();
        let providers = self.options.provider_policy().to_string();
        Ok(NetworkOptions {
            listen: Some(SocketAddr::new(address, 0)),
            rendezvous,
            insecure: true,
            name: format!("rank {}", self.rank()),
            provider: options.provider.or(Some(providers).filter(|text| !text.is_empty())),
            ..options
        })
    }
}

fn failed(cause: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::caused_by(JOIN, ErrorKind::Failed, cause)
}

/// Waits until a node is connected to this many others.
fn wait_for_nodes(node: &Node, others: u32, deadline: CallDeadline) -> Result<()> {
    const INTERVAL: Duration = Duration::from_millis(10);
    // The other ranks learn of a failure before their deadline.
    let end = deadline.left() / 2;
    let start = Instant::now();
    loop {
        let rows = node.report().map_err(failed)?;
        let peers = rows.iter().filter_map(|row| match row {
            Row::Peer { node, is_connected: true, .. } => Some(node),
            _ => None,
        });
        let connected = peers.collect::<HashSet<_>>().len();
        if connected >= others as usize {
            return Ok(());
        }
        if start.elapsed() >= end {
            let detail = rows.iter().find_map(|row| match row {
                Row::Peer { address, detail, is_connected: false, .. } => {
                    Some(format!(": {address}: {detail}"))
                }
                _ => None,
            });
            let detail = format!(
                "{connected} of {others} nodes of other machines are connected after {:?}{}",
                start.elapsed(),
                detail.unwrap_or_default()
            );
            return Err(Error::new(JOIN, ErrorKind::DeadlineExceeded, detail));
        }
        ipc::sleep_interruptible(INTERVAL);
    }
}

/// Joins a node, and returns the address at which it listens.
fn join_and_listen(options: NodeOptions) -> Result<(Option<Node>, String)> {
    let node = Node::join(options).map_err(failed)?;
    let rows = node.report().map_err(failed)?;
    let Some(Row::Node { listens: Some(address), .. }) = rows.first() else {
        let detail = "the node of rank 0 does not listen for others";
        return Err(Error::new(JOIN, ErrorKind::Failed, detail));
    };
    Ok((Some(node), address.clone()))
}

fn rank_failed(rank: u32, text: &str) -> Error {
    let detail = format!("rank {rank}: {text}");
    Error::new(JOIN, ErrorKind::RankFailed, detail).of_ranks([rank])
}
