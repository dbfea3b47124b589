//! All attacks, in the order in which they run.

/// The user of an attacker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum User {
    /// Another user than that of the node, where the test may change users.
    Other,
    /// The user of the node.
    Same,
}

/// Log entry that a service must write in a phase in which something was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// At least one line that contains one of these texts.
    Logged(&'static [&'static str]),
    /// No line is required, for this reason.
    NotLogged(&'static str),
}

/// Action of the supervisor, besides starting the processes of an attack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SupervisorAction {
    Nothing,
    /// Stops this number of them (SIGSTOP) until the end of the phase.
    Stop(usize),
    /// Limits the length of files and shared memory of the service.
    ShortFilesOfService(u64),
}

/// The attacking processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Actors {
    None,
    /// One attacker, in the network of node 2.
    Attacker(&'static str),
    /// Members of node 1.
    Members(Vec<String>),
}

/// One attack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Phase {
    pub name: &'static str,
    pub actors: Actors,
    pub user: User,
    pub cause: Cause,
    pub supervisor_action: SupervisorAction,
    /// Effect that `docs/how-to/security.md` documents for a process that reaches the port.
    pub documented: DocumentedEffect,
}

/// Effects that the documents allow an attack to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DocumentedEffect {
    Nothing,
    /// Messages between the nodes pause for about two seconds, once.
    OnePause,
    /// The session of the nodes is taken over: messages between them may stop during the attack.
    Takeover,
    /// The service runs out of descriptors.
    Descriptors,
}

impl Phase {
    fn attack(name: &'static str, cause: Cause) -> Self {
        Self {
            name,
            actors: Actors::Attacker(name),
            user: User::Other,
            cause,
            supervisor_action: SupervisorAction::Nothing,
            documented: DocumentedEffect::Nothing,
        }
    }

    fn same_user(name: &'static str, attack: &'static str, cause: Cause) -> Self {
        Self { name, user: User::Same, ..Self::attack(attack, cause) }
    }

    fn members(name: &'static str, members: Vec<String>, cause: Cause) -> Self {
        let actors = Actors::Members(members);
        Self { actors, ..Self::same_user(name, name, cause) }
    }

    /// Traffic without an attack.
    pub fn baseline() -> Self {
        let cause = Cause::NotLogged("no attack");
        Self { actors: Actors::None, ..Self::same_user("baseline", "baseline", cause) }
    }
}

impl Phase {
    /// Does the attack work on this provider? Only the protocol of `net` is implemented here.
    pub fn applies_to(&self, provider: &str) -> bool {
        provider == "net" || !self.name.starts_with("provider-")
    }
}

/// All attacks. The last one exhausts the descriptors of the service, as documented.
pub fn all() -> Vec<Phase> {
    use Cause::{Logged, NotLogged};
    const KERNEL: Cause = NotLogged("the kernel refuses the connection");
    const SILENT: Cause = NotLogged("no bytes were sent");
    const PROVIDER: Cause = NotLogged("the provider does not report it");
    const OWN_LIMIT: Cause = NotLogged("the limit is the member's own, and its error names it");
    const REFUSED: Cause = Logged(&["a connection was rejected"]);
    let one = |name: &str| vec![name.to_owned()];
    vec![
        Phase::attack("node-garbage", Logged(&["a connection was refused"])),
        Phase::attack("node-silent", SILENT),
        Phase::attack("node-slow", Logged(&["a connection was refused"])),
        Phase::attack("node-replay", Logged(&["node disconnected"])),
        Phase {
            documented: DocumentedEffect::Takeover,
            ..Phase::attack("node-takeover", Logged(&["node disconnected"]))
        },
        Phase::attack("provider-garbage", PROVIDER),
        Phase::attack("provider-silent", SILENT),
        Phase::attack("provider-crowd", SILENT),
        Phase::attack("provider-slow", PROVIDER),
        Phase {
            documented: DocumentedEffect::OnePause,
            ..Phase::attack("provider-forged", Logged(&["connection with a node stalled"]))
        },
        Phase::attack("socket-garbage", KERNEL),
        Phase::attack("socket-silent", KERNEL),
        Phase::attack("socket-slow", KERNEL),
        Phase::same_user("own-socket-garbage", "socket-garbage", REFUSED),
        Phase::same_user("own-socket-silent", "socket-silent", SILENT),
        Phase::same_user("own-socket-slow", "socket-slow", REFUSED),
        Phase::members("many-topics", one("topics:2000"), Logged(&["ulimit -n"])),
        Phase {
            supervisor_action: SupervisorAction::Stop(8),
            ..Phase::members("many-readers", vec!["reader".to_owned(); 40], Logged(&["evicted"]))
        },
        Phase::members("short-files", one("short-files"), OWN_LIMIT),
        Phase {
            supervisor_action: SupervisorAction::ShortFilesOfService(1 << 20),
            ..Phase::members("no-memory", one("large-topics"), Logged(&["ulimit -f"]))
        },
        Phase::members("few-descriptors", one("few-descriptors:28"), OWN_LIMIT),
        Phase::members("no-descriptors", one("all-descriptors:1024"), OWN_LIMIT),
        Phase::attack("provider-replay", PROVIDER),
        Phase {
            documented: DocumentedEffect::Descriptors,
            ..Phase::attack("provider-ports", PROVIDER)
        },
    ]
}
