//! Published regions, and transfers of whole regions.

use std::sync::Arc;
use std::time::Duration;

use gpu::Block;

use super::route::JOIN;
use super::{Agent, MAX_LABEL_LENGTH, MAX_PUBLISHED_REGIONS, Notice, PeerId, Route, Token};
use crate::error::{Error, ErrorKind, Result};
use crate::path::Policy;
use crate::region::Region;

impl Agent {
    /// Publishes a region by name on the [card](Self::card) from now on: peers
    /// [join](Self::route_to) it without its descriptor. A region published before under the name
    /// is replaced. The card does not keep the region: dropping it removes the name.
    ///
    /// Holders of the card can do with the region what its rights allow. The card file beside the
    /// agent's socket has no regions.
    ///
    /// # Errors
    /// [`NotAllowed`](ErrorKind::NotAllowed) for a local-only region;
    /// [`Stale`](ErrorKind::Stale) for a region of another agent; [`TooMany`](ErrorKind::TooMany)
    /// names;
    /// [`Failed`](ErrorKind::Failed) for an empty name, or one of more than 64 bytes.
    pub fn publish(&mut self, name: &str, region: &Region) -> Result<()> {
        let refuse = |kind, cause: &str| Err(Error::new("publish a region", kind, cause));
        if name.is_empty() || name.len() > MAX_LABEL_LENGTH {
            return refuse(ErrorKind::Failed, "a name has 1 to 64 bytes");
        }
        if region.0.descriptor.agent != self.local_target.identity {
            return refuse(ErrorKind::Stale, "the region belongs to another agent");
        }
        region.0.descriptor.encode()?;
        self.published.retain(|_, region| region.strong_count() > 0);
        if self.published.len() >= MAX_PUBLISHED_REGIONS && !self.published.contains_key(name) {
            return refuse(ErrorKind::TooMany, "32 regions are published already");
        }
        self.published.insert(name.to_owned(), Arc::downgrade(&region.0));
        Ok(())
    }

    /// Joins a region of this agent with one that a peer [published](Self::publish) by this name,
    /// as [`join`](Self::join) with the default policy.
    ///
    /// ```
    /// use std::time::Duration;
    /// use transfer::{Agent, AgentOptions, HostBuffer, Rights};
    /// let timeout = Duration::from_secs(5);
    /// let mut there = Agent::start(AgentOptions::new("decode"))?;
    /// let cache = HostBuffer::new(4096)?;
    /// let region = there.register(&cache, Rights::WRITE)?;
    /// there.publish("cache", &region)?;
    /// let card = there.card().encode()?; // all that the peer needs
    ///
    /// let mut here = Agent::start(AgentOptions::new("prefill"))?;
    /// let local = here.register_local(HostBuffer::from_vec(vec![7; 4096])?)?;
    /// let peer = here.connect(&card, timeout)?;
    /// let route = here.route_to(peer, "cache", &local, timeout)?;
    /// let put = here.put_all(&route, None)?;
    /// here.wait(put, timeout)?;
    /// let mut found = [0; 4096];
    /// cache.read(0, &mut found)?;
    /// assert_eq!(found, [7; 4096]);
    /// # Ok::<(), transfer::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Unknown`](ErrorKind::Unknown) if the peer's card has no such region, with the regions that
    /// it has; otherwise as [`join`](Self::join).
    pub fn route_to(
        &mut self,
        peer: PeerId,
        name: &str,
        local: &Region,
        timeout: Duration,
    ) -> Result<Route> {
        let card = &self.peer(peer.0, JOIN)?.card;
        let Some((_, remote)) = card.regions.iter().find(|(known, _)| known == name) else {
            let known: Vec<_> = card
                .regions
                .iter()
                .map(|(name, _)| format!("\"{}\"", name.escape_debug()))
                .collect();
            let detail = match known.is_empty() {
                true => "its card has no regions: the card file is written before regions are \
                 published. Exchange the card that Agent::card() returns after publishing"
                    .to_owned(),
                false => format!(
                    "its card has no region \"{}\", but these: {}",
                    name.escape_debug(),
                    known.join(", ")
                ),
            };
            let error = Error::new(JOIN, ErrorKind::Unknown, detail);
            return Err(error.with(&card.label));
        };
        let descriptor = remote.encode()?;
        self.join(peer, local, &descriptor, &Policy::default(), timeout)
    }

    /// Copies the whole local region of a route to the start of the remote one, and then sends the
    /// notice, if any.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) if the remote region is shorter; as
    /// [`put`](Self::put).
    pub fn put_all(&mut self, route: &Route, notice: Option<Notice>) -> Result<Token> {
        let length = route.0.local.descriptor.length;
        self.put(route, &[Block { to: 0, from: 0, length }], notice)
    }

    /// Copies the whole remote region of a route to the start of the local one, and then sends the
    /// notice, if any.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) if the local region is shorter; as
    /// [`get`](Self::get).
    pub fn get_all(&mut self, route: &Route, notice: Option<Notice>) -> Result<Token> {
        let length = route.0.remote.length;
        self.get(route, &[Block { to: 0, from: 0, length }], notice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AgentOptions, HostBuffer, Rights};

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
            "join two regions (there) failed: unknown: its card has no region \"other\", but \
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
            "join two regions (there) failed: unknown: its card has no regions: the card file is \
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
