//! Puts with notices.

use std::time::Duration;

use fabricast::gpu::Block;
use fabricast::transfer::path::Policy;
use fabricast::transfer::{Notice, Region, Rights, Route, Token};

use super::{Channel, Slots};
use crate::memory::{Location, Memory};
use crate::{Job, Result};

/// Puts into the slots of the other rank, with a notice each.
#[derive(Debug)]
pub struct AgentChannel {
    slots: Slots,
    memory: Memory,
    /// None for a rank without a partner.
    route: Option<Route>,
    timeout: Duration,
    sent: u64,
    arrived: u64,
    received: u64,
    tokens: Vec<Token>,
    _region: Region,
}

impl AgentChannel {
    /// All ranks call it, also those without a partner.
    ///
    /// # Errors
    /// Errors of the agent.
    pub fn new(job: &mut Job, partner: Option<u32>, slots: Slots, at: Location) -> Result<Self> {
        let timeout = job.timeout();
        let memory = Memory::new(at, job.group.local().rank, slots.bytes() as u64)?;
        let region = job.group.agent().register(memory.buffer(), Rights::WRITE)?;
        let descriptors = job.group.all_gather(&region.descriptor().encode()?, timeout)?;
        let mut route = None;
        if let Some(partner) = partner {
            let peer = job.group.peer(partner, timeout)?;
            let (agent, descriptor) = (job.group.agent(), &descriptors[partner as usize]);
            route = Some(agent.join(peer, &region, descriptor, &Policy::default(), timeout)?);
        }
        let tokens = Vec::new();
        let (sent, arrived, received) = (0, 0, 0);
        Ok(Self { slots, memory, route, timeout, sent, arrived, received, tokens, _region: region })
    }
}

impl Channel for AgentChannel {
    fn describe(&self) -> String {
        let path = self.route.as_ref().map_or("none", |route| route.path().name());
        format!("put + notice by {path}")
    }

    fn fill(&mut self, bytes: &[u8]) -> Result<()> {
        self.memory.write(self.slots.outgoing(self.sent) as u64, bytes)
    }

    fn send(&mut self, job: &mut Job, bytes: usize) -> Result<()> {
        let route = self.route.as_ref().ok_or("this rank has no partner")?;
        let block = Block {
            to: self.slots.incoming(self.sent) as u64,
            from: self.slots.outgoing(self.sent) as u64,
            length: bytes as u64,
        };
        let notice = Notice::new(self.sent, &[])?;
        self.tokens.push(job.group.agent().put(route, &[block], Some(notice))?);
        self.sent += 1;
        Ok(())
    }

    fn flush(&mut self, job: &mut Job) -> Result<()> {
        for token in self.tokens.drain(..) {
            job.group.agent().wait(token, self.timeout)?;
        }
        Ok(())
    }

    fn receive(&mut self, job: &mut Job, count: usize, _bytes: usize) -> Result<()> {
        self.received += count as u64;
        while self.arrived < self.received {
            job.next_notice(self.timeout)?;
            self.arrived += 1;
        }
        Ok(())
    }

    fn read(&mut self, before_last: u64, bytes: &mut [u8]) -> Result<()> {
        self.memory.read(self.slots.incoming(self.received - 1 - before_last) as u64, bytes)
    }
}
