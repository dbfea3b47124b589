//! Topics among the ranks of a job: one node for each machine.

use std::net::SocketAddr;
use std::time::Duration;

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
    /// The group sets directory, addresses and peers of the options; the rest, such as budgets, is
    /// used. The first rank of each machine serves the node while it runs, then another one does.
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
        let has_others = self.ranks.local().len() < self.size() as usize;
        let mut node = None;
        // The node of rank 0 is known to the others by its address.
        let mut rendezvous = None;
        if has_others {
            let joined = match self.rank() {
                0 => self.network(None).and_then(|network| {
                    options.network = Some(network);
                    join_and_listen(&options)
                }),
                _ => Ok((None, String::new())),
            };
            let text = match &joined {
                Ok((_, address)) => Ok(address.clone()),
                Err(error) => Err(error.to_string()),
            };
            let bytes = postcard::to_allocvec(&text)
                .map_err(|error| Error::caused_by(JOIN, ErrorKind::Failed, error))?;
            let bytes = self.broadcast(0, &bytes, deadline.left())?;
            node = joined?.0;
            let text: std::result::Result<String, String> = postcard::from_bytes(&bytes)
                .map_err(|error| Error::caused_by(JOIN, ErrorKind::Malformed, error))?;
            rendezvous = Some(text.map_err(|text| rank_failed(0, &text))?);
        }
        // The first rank of each machine serves it; the others join afterwards.
        for is_turn in [is_first, !is_first] {
            let joined = match (is_turn, node.take()) {
                (_, Some(node)) => Ok(Some(node)),
                (false, None) => Ok(None),
                (true, None) => self.join_node(&mut options, rendezvous.clone()).map(Some),
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

    fn join_node(&self, options: &mut NodeOptions, rendezvous: Option<String>) -> Result<Node> {
        if rendezvous.is_some() {
            options.network = Some(self.network(rendezvous)?);
        }
        Node::join(options.clone())
            .map_err(|error| Error::caused_by(JOIN, ErrorKind::Failed, error))
    }

    fn network(&self, rendezvous: Option<String>) -> Result<NetworkOptions> {
        if !self.options.is_insecure() {
            let detail = "nodes of several machines are not authenticated or encrypted yet. To allow \
                          this: GroupOptions::insecure";
            return Err(Error::new(JOIN, ErrorKind::InvalidArgument, detail));
        }
        let address = self.own_address()?;
        Ok(NetworkOptions {
            listen: Some(SocketAddr::new(address, 0)),
            rendezvous,
            insecure: true,
            name: format!("rank {}", self.rank()),
            ..NetworkOptions::default()
        })
    }
}

/// Joins a node, and returns the address at which it listens.
fn join_and_listen(options: &NodeOptions) -> Result<(Option<Node>, String)> {
    let failed = |error| Error::caused_by(JOIN, ErrorKind::Failed, error);
    let node = Node::join(options.clone()).map_err(failed)?;
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
