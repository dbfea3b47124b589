//! The simulation: each rank advances its rows, exchanges ghost rows, and publishes its rows.

use std::time::{Duration, Instant};

use fabricast::gpu::{self, Block};
use fabricast::pubsub::{Node, Publisher, ReportedSubscriber, Row};
use fabricast::transfer::path::Policy;
use fabricast::transfer::{Notice, Region, Rights, Route};
use mpi_examples::arrivals::Arrivals;
use mpi_examples::heat::{Slab, rows_of};
use mpi_examples::memory::{Location, Memory};
use mpi_examples::{Job, Result, numbers};

use crate::frame::{FIELD, Frame};

/// Ghost rows come from the neighbours by puts into this rank's memory.
struct GhostRows {
    /// The own first and last row.
    edges: Memory,
    /// Two pairs, used in turn: a neighbour may be one step ahead.
    ghosts: Memory,
    _region: Region,
    /// To the ranks above and below, with the ghost row there that is this rank's.
    neighbours: Vec<(usize, Route)>,
    arrivals: Arrivals,
    row: u64,
}

impl GhostRows {
    /// All ranks call it; those beyond `parts` have no neighbours.
    fn new(job: &mut Job, Run { grid, parts, at, .. }: Run) -> Result<Self> {
        let (rank, timeout) = (u64::from(job.group.rank()), job.timeout());
        let row = grid * size_of::<f64>() as u64;
        let memory = |bytes| Memory::new(at, job.group.local().rank, bytes);
        let (edges, ghosts) = (memory(2 * row)?, memory(4 * row)?);
        let agent = job.group.agent();
        let (source, region) = (
            agent.register_local(edges.buffer())?,
            agent.register(ghosts.buffer(), Rights::WRITE)?,
        );
        let descriptors = job.group.all_gather(&region.descriptor().encode()?, timeout)?;
        let mut neighbours = Vec::new();
        for (side, rank) in [(0, rank.checked_sub(1)), (1, Some(rank + 1))] {
            let is_part = |other: &u64| u64::from(job.group.rank()) < parts && *other < parts;
            let Some(rank) = rank.filter(is_part) else { continue };
            let peer = job.group.peer(rank as u32, timeout)?;
            let (descriptor, policy) = (&descriptors[rank as usize], Policy::default());
            let route = job.group.agent().join(peer, &source, descriptor, &policy, timeout)?;
            neighbours.push((side, route));
        }
        let arrivals = Arrivals::default();
        Ok(Self { edges, ghosts, _region: region, neighbours, arrivals, row })
    }

    fn exchange(&mut self, job: &mut Job, slab: &mut Slab, step: u64) -> Result<()> {
        let (timeout, agent, row) = (job.timeout(), job.group.agent(), self.row);
        let place = |side: usize| (step % 2 * 2 + side as u64) * row;
        for (edge, at) in slab.edges().into_iter().zip([0, row]) {
            self.edges.write(at, &numbers::to_bytes(edge))?;
        }
        let mut puts = Vec::new();
        for (side, route) in &self.neighbours {
            // The first row is the ghost row below the neighbour above.
            let block = Block { to: place(1 - side), from: *side as u64 * row, length: row };
            puts.push(agent.put(route, &[block], Some(Notice::new(step, b"")?))?);
        }
        for put in puts {
            agent.wait(put, timeout)?;
        }
        self.arrivals.wait(job, step, self.neighbours.len() as u32, timeout)?;
        let mut bytes = vec![0; row as usize];
        let targets = slab.ghosts_mut();
        for (side, _) in &self.neighbours {
            self.ghosts.read(place(*side), &mut bytes)?;
            numbers::from_bytes(&bytes, targets[*side]);
        }
        Ok(())
    }
}

/// How the simulation runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Run {
    pub(crate) grid: u64,
    pub(crate) steps: u64,
    pub(crate) every: u64,
    /// Additional time from field to field.
    pub(crate) pause: Duration,
    /// Ranks that simulate.
    pub(crate) parts: u64,
    /// Where fields and ghost rows are.
    pub(crate) at: Location,
}

impl Run {
    pub(crate) fn fields(&self) -> u64 {
        self.steps / self.every
    }
}

/// What the simulation had to do with the topic.
#[derive(Debug, Default)]
pub(crate) struct Published {
    pub(crate) fields: u64,
    /// Messages that found no room.
    pub(crate) dropped: u64,
    /// The longest time to publish one.
    pub(crate) longest: Duration,
    pub(crate) copies: Copies,
}

/// The messages in the memory of the node, and the subscribers that have them to read, when most
/// subscribers shared them.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Copies {
    pub(crate) subscribers: u64,
    pub(crate) unread: u64,
    pub(crate) messages: u64,
}

impl Copies {
    /// Messages in memory, by the report of the node.
    fn now(node: &Node) -> Result<Self> {
        let mut copies = Self::default();
        for row in node.report()? {
            match row {
                Row::Subscriber {
                    topic,
                    participant: ReportedSubscriber::Process(_),
                    unread,
                    held,
                    ..
                } if topic == FIELD => {
                    copies.subscribers += 1;
                    copies.unread += unread + held;
                }
                Row::Pool { is_inbound: false, blocks, .. } => copies.messages += blocks,
                _ => {}
            }
        }
        Ok(copies)
    }

    fn shared(&self) -> u64 {
        self.unread.saturating_sub(self.messages)
    }
}

/// Gets ready to simulate. All ranks call it, and then those that simulate call what it returns.
pub(crate) fn prepare(
    job: &mut Job,
    node: &Node,
    run: Run,
) -> Result<impl FnOnce(&mut Job, &Node) -> Result<Published> + use<>> {
    let mut ghost_rows = GhostRows::new(job, run)?;
    let topic = node.topic(FIELD, &Frame::settings(run.grid, run.parts, run.at))?;
    Ok(move |job: &mut Job, node: &Node| {
        let publisher = topic.publisher()?;
        let part = u64::from(job.group.rank());
        let rows = rows_of(part as usize, run.parts as usize, run.grid as usize);
        let mut slab = Slab::new(run.grid as usize, rows);
        let mut published = Published::default();
        for step in 1..=run.steps {
            ghost_rows.exchange(job, &mut slab, step)?;
            slab.advance();
            if !step.is_multiple_of(run.every) {
                continue;
            }
            let bytes = numbers::to_bytes(slab.rows());
            let Run { grid, every, parts, .. } = run;
            let (last, checksum) = (run.fields() * every, gpu::checksum(&bytes));
            let frame = Frame { step, last, every, grid, part, parts, checksum };
            publish(&publisher, frame, &bytes, job.timeout(), &mut published)?;
            // A report of the whole node is not for each field.
            if part == 0 && published.fields.is_multiple_of(5) {
                let now = Copies::now(node)?;
                if now.shared() >= published.copies.shared() {
                    published.copies = now;
                }
            }
            std::thread::sleep(run.pause);
        }
        Ok(published)
    })
}

fn publish(
    publisher: &Publisher,
    frame: Frame,
    bytes: &[u8],
    timeout: Duration,
    published: &mut Published,
) -> Result<()> {
    let start = Instant::now();
    let mut loan = publisher.loan(bytes.len() as u64, timeout)?;
    loan.write(0, bytes)?;
    loan.set_metadata(&frame.to_bytes())?;
    let sent = loan.publish(timeout)?;
    published.longest = published.longest.max(start.elapsed());
    published.dropped += u64::from(sent.is_dropped);
    published.fields += 1;
    Ok(())
}
