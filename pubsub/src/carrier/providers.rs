//! Which providers carry messages here and at other nodes. Two that do not understand each other find
//! that out before any topic is to go between them.
//!
//! A node tells another one what its provider is in the first letter, before it tells what it subscribes
//! to: so nothing is ever kept for a node that nothing can go to. The same letter goes to all when it
//! has another one, which may be so when its workers are begun anew at another address. What a node
//! says of topics before it is taken for nothing.

use std::fmt;
use std::time::Instant;

use super::Carrier;
use super::letters::Letter;
use crate::bridge::Provider;
use crate::peers::NodeIdentity;

/// So often a node may say that its provider is another one while it is connected: each time all
/// topics are looked at, and a line is logged.
const MOST_CHANGES: u32 = 64;

/// Two that do not understand each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Strangers {
    pub(super) here: String,
    pub(super) there: String,
}

impl Strangers {
    /// None as long as messages could go between the two, as far as it is known.
    fn of(ours: Option<&Provider>, theirs: Option<&Provider>) -> Option<Self> {
        let (ours, theirs) = (ours?, theirs?);
        (ours != theirs).then(|| Self { here: ours.to_string(), there: theirs.to_string() })
    }
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

impl Carrier {
    /// Messages are carried by this provider from now on, which other nodes have to know.
    pub(super) fn has_provider(&mut self, ours: &Provider) {
        if self.provider.as_ref() == Some(ours) {
            return;
        }
        self.provider = Some(ours.clone());
        for node in self.nodes.keys().copied().collect::<Vec<_>>() {
            self.tell_provider(node);
            self.compare_providers(node);
        }
    }

    /// Tells a node that has just come, if there is something to tell; or else all are told later.
    pub(super) fn tell_provider(&self, node: NodeIdentity) {
        if let Some(ours) = &self.provider {
            self.write(node, &Letter::Provider(ours.clone()));
        }
    }

    /// Another node has this one.
    pub(super) fn hears_of_provider(&mut self, node: NodeIdentity, theirs: Provider) {
        let theirs = Some(theirs);
        if let Some(remote) = self.nodes.get_mut(&node)
            && remote.provider != theirs
            && remote.changes < MOST_CHANGES
        {
            remote.changes += 1;
            remote.provider = theirs;
            self.compare_providers(node);
        }
    }

    /// Has a node said that it has the same provider as this one?
    pub(super) fn understands(&self, node: NodeIdentity) -> bool {
        let theirs = self.nodes.get(&node).and_then(|remote| remote.provider.as_ref());
        theirs.is_some() && theirs == self.provider.as_ref()
    }

    fn compare_providers(&mut self, node: NodeIdentity) {
        let theirs = self.nodes.get(&node).and_then(|remote| remote.provider.as_ref());
        let strangers = Strangers::of(self.provider.as_ref(), theirs);
        if self.misfits.strangers(node) == strangers.as_ref() {
            return;
        }
        let may_log = self.may_log(Instant::now());
        match &strangers {
            _ if !may_log => {}
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
    use super::*;

    fn provider(name: &str, protocol: u32) -> Provider {
        Provider { name: name.to_owned(), protocol, format: 2 }
    }

    #[test]
    fn only_who_is_known_to_be_a_stranger_is_one() {
        let (ours, other) = (provider("tcp", 25), provider("net", 25));
        for same in [None, Some(&ours)] {
            assert_eq!(Strangers::of(Some(&ours), same), None);
            assert_eq!(Strangers::of(same, Some(&ours)), None);
        }
        assert_eq!(Strangers::of(None, Some(&other)), None, "nothing carries messages here");
        assert!(Strangers::of(Some(&provider("net", 26)), Some(&other)).is_some());
        let said = Strangers::of(Some(&ours), Some(&other)).unwrap().to_string();
        let words = "is net (protocol 25, addresses 2), and that of this node tcp (protocol 25, ";
        assert!(said.contains(words) && said.ends_with("choose one for both"), "{said}");
    }
}
