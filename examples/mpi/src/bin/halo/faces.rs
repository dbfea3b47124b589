//! Contiguous faces between neighbours in a ring, by puts; with the feature `mpi` also by plain
//! messages.

use std::time::Duration;

use fabricast::gpu::Block;
use fabricast::transfer::path::Policy;
use fabricast::transfer::{Notice, Region, Rights, Route, Token};
use mpi_examples::memory::{Location, Memory};
use mpi_examples::{CommonOptions, Job, Result, pattern};

use crate::exchange::Exchange;
use crate::timing::{self, Timing};

/// Checked exchanges.
const ROUNDS: u64 = 4;
/// To the lower and to the upper neighbour.
const SIDES: u64 = 2;

/// The neighbours of a rank, the lower one first.
fn neighbours(job: &Job) -> [u32; 2] {
    let (rank, size) = (job.group.rank(), job.group.size());
    [(rank + size - 1) % size, (rank + 1) % size]
}

/// The pattern of a face.
fn number(rank: u32, side: u64, round: u64) -> u64 {
    (round << 32 | u64::from(rank)) * SIDES + side
}

/// Faces that can be checked.
trait Faces: Exchange {
    /// Writes a face that is sent.
    fn fill(&mut self, side: u64, bytes: &[u8]) -> Result<()>;

    /// Reads the face that the neighbour at this side sent last.
    fn take(&mut self, side: u64, bytes: &mut [u8]) -> Result<()>;
}

/// Checks and measures the exchange of faces.
pub(crate) fn run(face: u64, at: Location, timing: &Timing, options: &CommonOptions) -> Result<()> {
    let mut job = Job::start("halo", options)?;
    let mut puts = FacePuts::new(&mut job, face, at)?;
    if job.is_root() {
        let (size, path) = (job.group.size(), puts.routes[0].path());
        println!("# {size} ranks in a ring, faces of {face} bytes, path {path}");
    }
    let mut mistakes = check(&mut job, &mut puts, face)?;
    #[cfg(not(feature = "mpi"))]
    let other: Option<&mut dyn Exchange> = None;
    #[cfg(feature = "mpi")]
    let mut messages = messages::FaceMessages::new(&job, face, at)?;
    #[cfg(feature = "mpi")]
    let other = {
        mistakes += check(&mut job, &mut messages, face)?;
        Some(&mut messages as &mut dyn Exchange)
    };
    timing::compare(&mut job, timing, SIDES * face, &mut puts, other)?;
    // Also after many exchanges.
    mistakes += check(&mut job, &mut puts, face)?;
    job.finish("halo", mistakes)
}

fn check(job: &mut Job, faces: &mut dyn Faces, face: u64) -> Result<u64> {
    let mut bytes = vec![0; face as usize];
    let mut mistakes = 0;
    for round in 0..ROUNDS {
        for side in 0..SIDES {
            pattern::fill(&mut bytes, number(job.group.rank(), side, round));
            faces.fill(side, &bytes)?;
        }
        faces.exchange(job)?;
        for (side, neighbour) in (0..SIDES).zip(neighbours(job)) {
            faces.take(side, &mut bytes)?;
            // The upper face of the lower neighbour.
            mistakes += pattern::mistakes(&bytes, number(neighbour, 1 - side, round));
        }
    }
    Ok(mistakes)
}

/// By puts. The received faces are twofold: a neighbour may be one exchange ahead.
struct FacePuts {
    memory: Memory,
    face: u64,
    timeout: Duration,
    routes: Vec<Route>,
    tokens: Vec<Token>,
    /// The number of the next exchange.
    step: u64,
    /// Faces of the next exchange, and of the one after it, that have arrived.
    arrived: [u64; 2],
    _region: Region,
}

impl FacePuts {
    fn new(job: &mut Job, face: u64, at: Location) -> Result<Self> {
        let timeout = job.timeout();
        let memory = Memory::new(at, job.group.local().rank, 3 * SIDES * face)?;
        let region = job.group.agent().register(memory.buffer(), Rights::WRITE)?;
        let descriptors = job.group.all_gather(&region.descriptor().encode()?, timeout)?;
        let mut routes = Vec::new();
        for neighbour in neighbours(job) {
            let peer = job.peer(neighbour)?;
            let (agent, descriptor) = (job.group.agent(), &descriptors[neighbour as usize]);
            routes.push(agent.join(peer, &region, descriptor, &Policy::default(), timeout)?);
        }
        let tokens = Vec::new();
        Ok(Self {
            memory,
            face,
            timeout,
            routes,
            tokens,
            step: 0,
            arrived: [0; 2],
            _region: region,
        })
    }

    /// Where the face of an exchange is received.
    fn place(&self, step: u64, side: u64) -> u64 {
        (SIDES * (1 + step % 2) + side) * self.face
    }
}

impl Exchange for FacePuts {
    fn name(&self) -> String {
        "fabricast, put + notify".to_owned()
    }

    fn exchange(&mut self, job: &mut Job) -> Result<()> {
        let agent = job.group.agent();
        for (side, route) in (0..SIDES).zip(&self.routes) {
            let (from, length) = (side * self.face, self.face);
            let block = Block { to: self.place(self.step, 1 - side), from, length };
            let notice = Notice::new(self.step, &[])?;
            self.tokens.push(agent.put(route, &[block], Some(notice))?);
        }
        while self.arrived[(self.step % 2) as usize] < SIDES {
            let notice = job.next_notice(self.timeout)?;
            if !(self.step..self.step + 2).contains(&notice.tag) {
                return Err(format!("unexpected notice of step {}", notice.tag).into());
            }
            self.arrived[(notice.tag % 2) as usize] += 1;
        }
        let agent = job.group.agent();
        for token in self.tokens.drain(..) {
            agent.wait(token, self.timeout)?;
        }
        self.arrived[(self.step % 2) as usize] = 0;
        self.step += 1;
        Ok(())
    }
}

impl Faces for FacePuts {
    fn fill(&mut self, side: u64, bytes: &[u8]) -> Result<()> {
        self.memory.write(side * self.face, bytes)
    }

    fn take(&mut self, side: u64, bytes: &mut [u8]) -> Result<()> {
        self.memory.read(self.place(self.step + 1, side), bytes)
    }
}

#[cfg(feature = "mpi")]
mod messages {
    use fabricast::ipc::WaitStrategy;
    use mpi_examples::messages::{Datatype, MessageMemory, Part};

    use super::*;

    /// By messages. Faces of a device are staged in host memory.
    pub(super) struct FaceMessages {
        device: Option<Memory>,
        /// The faces to send, and the received ones.
        host: MessageMemory<u8>,
        datatype: Datatype,
        neighbours: [u32; 2],
        face: u64,
        strategy: WaitStrategy,
    }

    impl FaceMessages {
        pub(super) fn new(job: &Job, face: u64, at: Location) -> Result<Self> {
            let device = match at {
                Location::Host => None,
                _ => Some(Memory::new(at, job.group.local().rank, 2 * SIDES * face)?),
            };
            Ok(Self {
                device,
                host: MessageMemory::new((2 * SIDES * face) as usize),
                datatype: Datatype::bytes(face as usize)?,
                neighbours: neighbours(job),
                face,
                strategy: job.wait_strategy(),
            })
        }
    }

    impl Exchange for FaceMessages {
        fn name(&self) -> String {
            match self.device {
                None => "mpi, send + receive".to_owned(),
                Some(_) => "mpi, staged in host".to_owned(),
            }
        }

        fn exchange(&mut self, _job: &mut Job) -> Result<()> {
            let outgoing = (SIDES * self.face) as usize;
            if let Some(device) = &self.device {
                device.read(0, &mut self.host.memory()[..outgoing])?;
            }
            let datatype = &self.datatype;
            for (side, rank) in (0..SIDES).zip(self.neighbours) {
                let at = ((SIDES + side) * self.face) as usize;
                self.host.receive(Part { at, datatype, rank, tag: 1 - side as u32 })?;
            }
            for (side, rank) in (0..SIDES).zip(self.neighbours) {
                let at = (side * self.face) as usize;
                self.host.send(Part { at, datatype, rank, tag: side as u32 })?;
            }
            self.host.wait(self.strategy)?;
            match &self.device {
                Some(device) => device.write(SIDES * self.face, &self.host.memory()[outgoing..]),
                None => Ok(()),
            }
        }
    }

    impl Faces for FaceMessages {
        fn fill(&mut self, side: u64, bytes: &[u8]) -> Result<()> {
            let at = side * self.face;
            match &self.device {
                Some(device) => device.write(at, bytes)?,
                None => self.host.memory()[at as usize..][..bytes.len()].copy_from_slice(bytes),
            }
            Ok(())
        }

        fn take(&mut self, side: u64, bytes: &mut [u8]) -> Result<()> {
            let at = (SIDES + side) * self.face;
            match &self.device {
                Some(device) => device.read(at, bytes)?,
                None => bytes.copy_from_slice(&self.host.memory()[at as usize..][..bytes.len()]),
            }
            Ok(())
        }
    }
}
