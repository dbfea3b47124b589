//! Which providers carry messages here and at other nodes. Two that do not understand each other find
//! that out before any topic is to go between them.
//!
//! A node tells another one what its provider is when the two meet, before it tells what it subscribes
//! to: so nothing is ever kept for a node that nothing can go to. All are told in a letter when it has
//! another one. Of one that does not say it, it stands in the first letter about a topic.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::Carrier;
use super::letters::{Kind, Note};
use super::receiving::Letter;
use crate::bridge::{LONGEST_PROVIDER, Spot};
use crate::error::Result;
use crate::peers::NodeIdentity;

/// So often a node may say that its provider is another one, as long as it is there: each time all
/// topics are looked at.
const MOST_CHANGES: u32 = 64;

/// What carries messages at a node: the same at both, or they do not understand each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Provider {
    name: String,
    protocol: u32,
    /// The format of its addresses.
    format: u32,
}

impl Provider {
    pub(super) fn of(spot: &Spot) -> Self {
        Self { name: spot.provider.clone(), protocol: spot.protocol, format: spot.format }
    }
}

impl Note for Provider {
    const KIND: Kind = Kind::Provider;
    const READ: &'static str = "read which provider another node has";

    fn check(&self) -> std::result::Result<(), &'static str> {
        let fits = self.name.len() <= LONGEST_PROVIDER;
        fits.then_some(()).ok_or("a name without end")
    }
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (protocol {}, addresses {})", self.name, self.protocol, self.format)
    }
}

/// Two that do not understand each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Strangers {
    pub(super) here: String,
    pub(super) there: String,
}

impl fmt::Display for Strangers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { here, there } = self;
        write!(
            f,
            "no messages can go there, or come from there: its provider is {there}, and that of "
        )?;
        write!(f, "this node {here}; choose one for both")
    }
}

/// What is known of them.
#[derive(Debug, Default)]
pub(super) struct Providers {
    ours: Option<Provider>,
    theirs: BTreeMap<NodeIdentity, Provider>,
    /// How often nodes that are there said that they have another one.
    changes: BTreeMap<NodeIdentity, u32>,
}

impl Providers {
    /// None as long as messages could go between the two, as far as it is known.
    pub(super) fn differ(&self, node: NodeIdentity) -> Option<Strangers> {
        let (ours, theirs) = (self.ours.as_ref()?, self.theirs.get(&node)?);
        let strangers = || Strangers { here: ours.to_string(), there: theirs.to_string() };
        (ours != theirs).then(strangers)
    }

    /// The node is gone.
    pub(super) fn forget(&mut self, node: NodeIdentity) {
        self.theirs.remove(&node);
        self.changes.remove(&node);
    }

    /// A node has this one. True if that is news; what is said again and again is none.
    fn learn(&mut self, node: NodeIdentity, theirs: Provider) -> bool {
        if self.theirs.get(&node) == Some(&theirs) {
            return false;
        }
        let changes = self.changes.entry(node).or_default();
        *changes += 1;
        if *changes > MOST_CHANGES {
            return false;
        }
        self.theirs.insert(node, theirs);
        true
    }
}

impl Carrier {
    /// Messages are carried by this provider from now on, which other nodes have to know.
    pub(super) fn has_provider(&mut self, ours: Provider) {
        if self.providers.ours.as_ref() == Some(&ours) {
            return;
        }
        self.providers.ours = Some(ours);
        for node in self.nodes.keys().copied().collect::<Vec<_>>() {
            self.tell_provider(node);
            self.compare_providers(node);
        }
    }

    /// Tells a node that has just come, if there is something to tell; or else all are told later.
    pub(super) fn tell_provider(&self, node: NodeIdentity) {
        if let Some(ours) = &self.providers.ours {
            self.write(node, &Letter { topic: String::new(), terms: ours.encode() });
        }
    }

    /// Another node tells it.
    pub(super) fn reads_provider(&mut self, node: NodeIdentity, letter: &Letter) -> Result<()> {
        self.hears_of_provider(node, Provider::decode(&letter.terms)?);
        Ok(())
    }

    /// Another node has this one.
    pub(super) fn hears_of_provider(&mut self, node: NodeIdentity, theirs: Provider) {
        if self.providers.learn(node, theirs) {
            self.compare_providers(node);
        }
    }

    fn compare_providers(&mut self, node: NodeIdentity) {
        let strangers = self.providers.differ(node);
        if self.misfits.strangers(node) == strangers.as_ref() {
            return;
        }
        match &strangers {
            Some(strangers) => {
                let label = self.known.label(node);
                let Strangers { here, there } = strangers;
                tracing::warn!(
                    %node, label, here, there,
                    "another node has another provider: no messages go between the two until both have the same"
                );
            }
            None => tracing::info!(%node, "another node has the same provider now"),
        }
        self.plan.set_stranger(node, strangers.is_some());
        self.misfits.set_strangers(node, strangers);
        self.stir_all();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::carrier::letters::tests::{is_read_as_written, is_read_or_refused, is_refused};

    const NODE: NodeIdentity = NodeIdentity([1; 16]);

    fn provider(name: &str, protocol: u32) -> Provider {
        Provider { name: name.to_owned(), protocol, format: 2 }
    }

    #[test]
    fn only_who_is_known_to_be_a_stranger_is_one() {
        let mut providers = Providers::default();
        assert_eq!(providers.differ(NODE), None);
        assert!(providers.learn(NODE, provider("net", 25)));
        assert_eq!(providers.differ(NODE), None, "nothing carries messages here");
        for (ours, differs) in
            [(provider("net", 25), false), (provider("net", 26), true), (provider("tcp", 25), true)]
        {
            providers.ours = Some(ours);
            assert_eq!(providers.differ(NODE).is_some(), differs);
        }
        let said = providers.differ(NODE).unwrap().to_string();
        let words = "is net (protocol 25, addresses 2), and that of this node tcp (protocol 25, ";
        assert!(said.contains(words) && said.ends_with("choose one for both"), "{said}");
        providers.forget(NODE);
        assert_eq!(providers.differ(NODE), None);
    }

    #[test]
    fn one_that_says_another_one_again_and_again_is_not_listened_to_for_ever() {
        let mut providers = Providers::default();
        let news = (0..3 * MOST_CHANGES).filter(|number| {
            assert!(!providers.learn(NODE, provider("net", number + 1)) || *number < MOST_CHANGES);
            providers.theirs[&NODE] == provider("net", number + 1)
        });
        assert_eq!(news.count(), MOST_CHANGES as usize);
        providers.forget(NODE);
        assert!(providers.learn(NODE, provider("net", 1)));
    }

    #[test]
    fn letters_are_read_as_written() {
        is_read_as_written(&provider("tcp;ofi_rxm", 1 << 31));
        is_refused::<Provider>(&provider(&"x".repeat(LONGEST_PROVIDER + 1), 1).encode());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            is_read_or_refused::<Provider>(&bytes);
        }
    }
}
