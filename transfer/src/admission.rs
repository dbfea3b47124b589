//! Which users may connect to a socket.

use ipc::{Channel, Credentials};

/// The users and groups that may connect.
///
/// For the own user alone, the mode of the socket keeps out all other users but root. Otherwise
/// every user may connect, the kernel reports the credentials, and users that are not admitted
/// receive a refusal. The directories above the socket are never changed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Admission {
    /// User ids.
    pub users: Vec<u32>,
    /// Group ids, compared with the effective and the supplementary groups of a client.
    pub groups: Vec<u32>,
}

impl Admission {
    /// Admits only the user of this process.
    #[must_use]
    pub fn own_user() -> Self {
        Self { users: vec![Credentials::of_this_process().user], groups: Vec::new() }
    }

    /// The mode of the socket that lets all admitted users connect.
    pub(crate) fn mode(&self) -> u32 {
        let own = Credentials::of_this_process().user;
        let is_own = self.groups.is_empty() && self.users.iter().all(|user| *user == own);
        if is_own { 0o600 } else { 0o666 }
    }

    /// The user of the peer, if it is admitted.
    pub(crate) fn admitted_user(&self, channel: &Channel) -> Option<u32> {
        let peer = channel.credentials().ok()?;
        let has = |group: &u32| self.groups.contains(group);
        let may = self.users.contains(&peer.user)
            || has(&peer.group)
            || (!self.groups.is_empty() && channel.groups().ok()?.iter().any(has));
        may.then_some(peer.user)
    }
}
