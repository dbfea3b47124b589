//! The regions of an agent by number, and the table of them that peers read.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};

use ipc::SegmentError;

use super::region_table::RegionTable;
use crate::error::{Error, ErrorKind, Result};
use crate::lock;
use crate::region::RegisteredRegion;
use crate::share::random;

#[derive(Debug, Default)]
struct Regions {
    last: u64,
    all: HashMap<u64, Weak<RegisteredRegion>>,
}

#[derive(Debug)]
pub(super) struct RegionRegistry {
    table: RegionTable,
    regions: Mutex<Regions>,
}

impl RegionRegistry {
    pub(super) fn create() -> std::result::Result<Self, SegmentError> {
        Ok(Self { table: RegionTable::create()?, regions: Mutex::default() })
    }

    /// A read-only descriptor of the table for a peer.
    pub(super) fn table(&self) -> std::result::Result<OwnedFd, SegmentError> {
        self.table.read_only()
    }

    /// Adds a region under a new number and ticket.
    pub(super) fn add(
        &self,
        make: impl FnOnce(u64, u64) -> Arc<RegisteredRegion>,
    ) -> Result<Arc<RegisteredRegion>> {
        let operation = "register a region";
        let ticket: [u8; 16] = random(operation)?;
        let mut regions = lock(&self.regions);
        let Some(number) = self.table.insert_after(regions.last) else {
            let detail = "the region table is full";
            return Err(Error::new(operation, ErrorKind::TooMany, detail));
        };
        regions.last = number;
        let ticket = u64::from_le_bytes(ticket[..8].try_into().unwrap_or_default());
        let region = make(number, ticket);
        regions.all.insert(number, Arc::downgrade(&region));
        Ok(region)
    }

    /// A number for a local-only region, which is in no table.
    pub(super) fn next_number(&self) -> u64 {
        let mut regions = lock(&self.regions);
        regions.last += 1;
        regions.last
    }

    pub(super) fn remove(&self, number: u64) {
        self.table.remove(number);
        lock(&self.regions).all.remove(&number);
    }

    /// The agent ends: removes all regions.
    pub(super) fn close(&self) {
        self.table.close();
        let all = std::mem::take(&mut lock(&self.regions).all);
        all.into_keys().for_each(|number| self.table.remove(number));
    }

    /// The region with this number, if the ticket is right.
    pub(super) fn find(&self, number: u64, ticket: u64) -> Option<Arc<RegisteredRegion>> {
        let found = lock(&self.regions).all.get(&number)?.upgrade()?;
        (self.table.contains(number) && found.descriptor.ticket == ticket).then_some(found)
    }
}
