//! Regions that the staging copies of a target use now.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};

use threads::lock;

/// Copies by region.
#[derive(Debug, Default)]
pub(super) struct RegionUses(Mutex<HashMap<u64, RegionUsers>>);

#[derive(Debug)]
struct RegionUsers {
    copies: usize,
    /// The peer of the first copy.
    label: Arc<str>,
}

/// A copy with a region, until it is dropped.
#[derive(Debug)]
pub(super) struct RegionUse {
    uses: Arc<RegionUses>,
    region: u64,
}

impl RegionUse {
    /// Registers a copy for a peer. Called *before* the region is looked up: a withdrawal removes
    /// the region first, and then looks for copies.
    pub(super) fn begin(uses: &Arc<RegionUses>, region: u64, label: &Arc<str>) -> Self {
        let mut regions = lock(&uses.0);
        let new = || RegionUsers { copies: 0, label: Arc::clone(label) };
        regions.entry(region).or_insert_with(new).copies += 1;
        Self { uses: Arc::clone(uses), region }
    }
}

impl Drop for RegionUse {
    fn drop(&mut self) {
        if let Entry::Occupied(mut users) = lock(&self.uses.0).entry(self.region) {
            users.get_mut().copies -= 1;
            if users.get().copies == 0 {
                users.remove();
            }
        }
    }
}

impl RegionUses {
    /// A peer for which a region is copied now, if any.
    pub(super) fn user_of(&self, region: u64) -> Option<String> {
        lock(&self.0).get(&region).map(|users| users.label.to_string())
    }

    /// A peer for which any region is copied now.
    pub(super) fn any_user(&self) -> Option<String> {
        lock(&self.0).values().next().map(|users| users.label.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn region_is_used_until_its_last_copy_ends() {
        let uses = Arc::new(RegionUses::default());
        let label = Arc::from("peer");
        let first = RegionUse::begin(&uses, 3, &label);
        let second = RegionUse::begin(&uses, 3, &label);
        drop(first);
        assert_eq!((uses.user_of(3).as_deref(), uses.user_of(4)), (Some("peer"), None));
        assert!(uses.any_user().is_some());
        drop(second);
        assert_eq!((uses.user_of(3), uses.any_user()), (None, None));
    }
}
