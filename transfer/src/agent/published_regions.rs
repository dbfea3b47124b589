//! Regions on the card of an agent, by name.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use super::MAX_PUBLISHED_REGIONS;
use crate::error::{Error, ErrorKind, Result};
use crate::region::{Region, RegionDescriptor, RegisteredRegion};
use crate::wire::MAX_LABEL_LENGTH;

#[derive(Debug, Default)]
pub(super) struct PublishedRegions(BTreeMap<String, Weak<RegisteredRegion>>);

impl PublishedRegions {
    /// Publishes a region of the agent with this identity.
    pub(super) fn publish(&mut self, name: &str, region: &Region, agent: [u8; 16]) -> Result<()> {
        let refuse = |kind, cause: &str| Err(Error::new("publish region", kind, cause));
        if name.is_empty() || name.len() > MAX_LABEL_LENGTH {
            let cause = format!("a name has 1 to {MAX_LABEL_LENGTH} bytes");
            return refuse(ErrorKind::Failed, &cause);
        }
        if region.0.descriptor.agent != agent {
            return refuse(ErrorKind::Stale, "the region belongs to another agent");
        }
        region.0.descriptor.encode()?;
        self.0.retain(|_, region| region.strong_count() > 0);
        if self.0.len() >= MAX_PUBLISHED_REGIONS && !self.0.contains_key(name) {
            let cause = format!("{MAX_PUBLISHED_REGIONS} regions are published already");
            return refuse(ErrorKind::TooMany, &cause);
        }
        self.0.insert(name.to_owned(), Arc::downgrade(&region.0));
        Ok(())
    }

    /// The regions that exist.
    pub(super) fn all(&self) -> Vec<(String, RegionDescriptor)> {
        let region = |(name, region): (&String, &Weak<RegisteredRegion>)| {
            let region = region.upgrade()?;
            let exists = !region.is_withdrawn();
            exists.then(|| (name.clone(), region.descriptor.clone()))
        };
        self.0.iter().filter_map(region).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Agent, AgentOptions, HostBuffer, Rights};

    const SECOND: Duration = Duration::from_secs(1);

    fn agent(label: &str) -> Agent {
        Agent::start(AgentOptions::new(label)).unwrap()
    }

    fn buffer(length: u64, byte: u8) -> HostBuffer {
        let buffer = HostBuffer::new(length).unwrap();
        buffer.write(0, &vec![byte; length as usize]).unwrap();
        buffer
    }

    fn bytes(buffer: &HostBuffer) -> Vec<u8> {
        let mut bytes = vec![0; buffer.length() as usize];
        buffer.read(0, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn published_region_is_joined_by_name_and_copied_whole() {
        let (mut here, mut there) = (agent("here"), agent("there"));
        let (local_buffer, remote_buffer) = (buffer(4096, 1), buffer(4096, 2));
        let local = here.register(&local_buffer, Rights::ALL).unwrap();
        let remote = there.register(&remote_buffer, Rights::ALL).unwrap();
        there.publish("cache", &remote).unwrap();
        let peer = here.connect(&there.card().encode().unwrap(), SECOND).unwrap();
        let route = here.route_to(peer, "cache", &local, SECOND).unwrap();
        let get = here.get_all(&route, None).unwrap();
        assert_eq!(here.wait(get, SECOND).unwrap().bytes, 4096);
        assert_eq!(bytes(&local_buffer), [2; 4096]);
        local_buffer.write(0, &[3; 4096]).unwrap();
        let put = here.put_all(&route, None).unwrap();
        here.wait(put, SECOND).unwrap();
        assert_eq!(bytes(&remote_buffer), [3; 4096]);

        let error = here.route_to(peer, "other", &local, SECOND).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Unknown, Some("there")));
        assert_eq!(
            error.to_string(),
            "join two regions (peer there) failed: unknown: its card has no region \"other\", but \
             these: \"cache\""
        );
    }

    #[test]
    fn card_from_before_publishing_lacks_the_region() {
        let directory =
            TempDir(std::env::temp_dir().join(format!("fc-named-{}", std::process::id())));
        std::fs::create_dir_all(&directory.0).unwrap();
        let mut there = Agent::start(AgentOptions::new("there").directory(&directory.0)).unwrap();
        let remote = there.register(buffer(64, 0), Rights::ALL).unwrap();
        there.publish("cache", &remote).unwrap();
        let of_card = |found: &std::fs::DirEntry| found.path().extension().is_some();
        let file = std::fs::read_dir(&directory.0).unwrap().flatten().find(of_card).unwrap();

        let mut here = agent("here");
        let local = here.register(buffer(64, 0), Rights::ALL).unwrap();
        let peer = here.connect(&std::fs::read(file.path()).unwrap(), SECOND).unwrap();
        let error = here.route_to(peer, "cache", &local, SECOND).unwrap_err();
        assert_eq!(
            error.to_string(),
            "join two regions (peer there) failed: unknown: its card has no regions: the card file is \
             written before regions are published. Exchange the card that Agent::card() returns \
             after publishing"
        );
    }

    /// Removes the directory at the end.
    struct TempDir(std::path::PathBuf);

    impl Drop for TempDir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn longer_region_is_not_copied_whole_into_a_shorter_one() {
        let (mut here, mut there) = (agent("here"), agent("there"));
        let (local_buffer, remote_buffer) = (buffer(4096, 1), buffer(100, 2));
        let local = here.register(&local_buffer, Rights::ALL).unwrap();
        let remote = there.register(&remote_buffer, Rights::ALL).unwrap();
        there.publish("short", &remote).unwrap();
        let peer = here.connect(&there.card().encode().unwrap(), SECOND).unwrap();
        let route = here.route_to(peer, "short", &local, SECOND).unwrap();
        assert_eq!(here.put_all(&route, None).unwrap_err().kind(), ErrorKind::OutOfBounds);
        let get = here.get_all(&route, None).unwrap();
        here.wait(get, SECOND).unwrap();
        assert_eq!(bytes(&local_buffer)[..101], [&[2; 100][..], &[1]].concat());
    }

    #[test]
    fn card_has_only_existing_regions_with_rights() {
        let (mut one, other) = (agent("one"), agent("other"));
        let region = one.register(buffer(64, 0), Rights::READ).unwrap();
        let local_only = one.register_local(buffer(64, 0)).unwrap();
        assert_eq!(one.publish("own", &local_only).unwrap_err().kind(), ErrorKind::NotAllowed);
        let foreign = other.register(buffer(64, 0), Rights::READ).unwrap();
        assert_eq!(one.publish("foreign", &foreign).unwrap_err().kind(), ErrorKind::Stale);
        assert!(one.publish("", &region).is_err());
        one.publish("kept", &region).unwrap();
        let withdrawn = one.register(buffer(64, 0), Rights::READ).unwrap();
        one.publish("withdrawn", &withdrawn).unwrap();
        one.withdraw(&withdrawn, SECOND).unwrap();
        let dropped = one.register(buffer(64, 0), Rights::READ).unwrap();
        one.publish("dropped", &dropped).unwrap();
        drop(dropped);
        let names: Vec<_> = one.card().regions.into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["kept"]);
    }

    #[test]
    fn regions_beyond_the_size_of_a_card_are_refused() {
        let mut one = agent("one");
        let region = one.register(buffer(64, 0), Rights::READ).unwrap();
        for number in 0..MAX_PUBLISHED_REGIONS {
            one.publish(&format!("{number:0>64}"), &region).unwrap();
        }
        assert_eq!(one.publish("more", &region).unwrap_err().kind(), ErrorKind::TooMany);
        let card = one.card();
        let read = super::super::AgentCard::decode(&card.encode().unwrap()).unwrap();
        assert_eq!((read.regions.len(), &read), (MAX_PUBLISHED_REGIONS, &card));
    }
}
