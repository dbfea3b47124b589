//! A process of this command at its node.

use std::time::Duration;

use pubsub::{
    Budgets, ErrorKind, MAX_TOPIC_NAME, MemoryLocation, NetworkOptions, Node, NodeOptions,
    Publisher, Row, ServiceMode, Topic, TopicSettings,
};

use super::connectivity::{self, ConnectivityReporter, Phase};
use super::exit::{Exit, Failure};
use super::service_wait::ServiceWait;
use super::settings::{Count, Group, Service, Settings, Size, TABLE};
use super::signals::{Deadline, Signals};
use super::text;

/// How the library is to join, as the settings have it; `name` is the subcommand's.
pub(crate) fn options(settings: &Settings, name: &str) -> NodeOptions {
    let label = settings.label.value.clone();
    let of_size = |size: Option<Size>| size.map(|size| size.0);
    NodeOptions {
        directory: settings.directory.value.clone(),
        label: label.unwrap_or_else(|| format!("fabricast {name}")),
        service: match settings.service.value {
            Service::Embedded => ServiceMode::Embedded,
            Service::External => ServiceMode::External,
        },
        service_timeout: settings.service_timeout.value,
        budgets: Budgets {
            host: of_size(settings.budget_host.value),
            device: of_size(settings.budget_device.value),
        },
        network: network(settings),
        ..NodeOptions::default()
    }
}

/// How the node is connected to others, if it is.
fn network(settings: &Settings) -> Option<NetworkOptions> {
    let is_connected = settings.listen.value.is_some()
        || settings.rendezvous.value.is_some()
        || !settings.peers.value.is_empty();
    is_connected.then(|| NetworkOptions {
        listen: settings.listen.value,
        peers: settings.peers.value.clone(),
        rendezvous: settings.rendezvous.value.clone(),
        insecure: settings.insecure.value,
        // If it is empty, the library takes the label.
        name: settings.node_name.value.clone().unwrap_or_default(),
        provider: settings.provider.value.clone(),
        lanes: settings.lanes.value.map_or(0, |lanes| lanes.0 as usize),
        workers: settings.workers.value.map_or(0, |workers| workers.0 as usize),
        source: settings.source.value,
        lost_after: settings.lost_after.value,
    })
}

/// Joins the node, unless it is asked to end meanwhile.
pub(crate) fn join(
    settings: &Settings,
    options: NodeOptions,
    service: &ServiceWait,
    signals: &Signals,
) -> Result<Node, Failure> {
    check_directory(settings)?;
    let joined = service.ask(signals, move || Node::join(options))?;
    joined.map_err(|error| service.explain(error))
}

/// Refuses a directory of a node that cannot be made: of one that was named only the last part is, so that
/// a mistyped path is noticed.
fn check_directory(settings: &Settings) -> Result<(), Failure> {
    check_not_a_file(settings)?;
    let directory = &settings.directory;
    let parent = directory.value.parent().filter(|parent| !parent.as_os_str().is_empty());
    let Some(parent) = parent.filter(|_| directory.is_set() && !directory.value.exists()) else {
        return Ok(());
    };
    let name = text::escape_control(&parent.display().to_string());
    let why = match parent.metadata() {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => format!("{name} is a file, not a directory"),
        Err(error) if is_absent(&error) => format!(
            "{name} does not exist, and only the last part of the path is created. Create it first, or correct \
             the path"
        ),
        // The library says why.
        Err(_) => return Ok(()),
    };
    Err(directory_error(settings, &why))
}

/// Refuses a file where the directory of a node is expected.
pub(crate) fn check_not_a_file(settings: &Settings) -> Result<(), Failure> {
    match settings.directory.value.metadata() {
        Ok(found) if !found.is_dir() => {
            let why = "it is a file, not a directory. Choose another one: --directory";
            Err(directory_error(settings, why))
        }
        _ => Ok(()),
    }
}

fn is_absent(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory)
}

fn directory_error(settings: &Settings, why: &str) -> Failure {
    let directory = &settings.directory;
    let origin = directory.origin.as_deref().unwrap_or("the default directory");
    let path = text::escape_control(&directory.value.display().to_string());
    Failure::new(Exit::Usage, format!("{origin} is \"{path}\": {why}"))
}

/// Asks the node of a directory what goes on, without joining it.
pub(crate) fn report(settings: &Settings) -> Result<Vec<Row>, Failure> {
    check_not_a_file(settings)?;
    let directory = settings.directory.value.clone();
    let service = ServiceWait::of(&directory);
    let reported = service.run_without_signals(move || pubsub::report(&directory))?;
    reported.map_err(|error| match error.kind() {
        ErrorKind::NotFound => Failure::new(
            Exit::NotFound,
            format!(
                "{error}. Start \"fabricast node\", or a publisher or subscriber, or name the directory of a node \
                 that runs: --directory (by default it depends on XDG_RUNTIME_DIR)"
            ),
        ),
        _ => service.explain(error),
    })
}

/// An error of the library, with what to do about it in options of this command.
pub(crate) fn with_remedy(error: pubsub::Error) -> Failure {
    let remedy = match error.kind() {
        ErrorKind::OverBudget => {
            "Reserve less (--largest, --depth, --loans), or serve the node with a larger budget (--budget-host, \
             --budget-device)"
        }
        ErrorKind::TooLong => {
            "Publish shorter messages, or create a topic with a larger --largest: it is fixed while the topic is in use"
        }
        ErrorKind::Denied => "Choose a directory of this user: --directory",
        ErrorKind::AlreadyServed => {
            "Stop that process first, or give this node its own directory: --directory"
        }
        _ if is_read_only(&error) => {
            let why =
                format!("{error}. Choose a directory that this user can write in: --directory");
            return Failure::new(Exit::Denied, why);
        }
        _ => return error.into(),
    };
    let why = error.to_string();
    let failure = Failure::from(error);
    Failure::new(failure.exit(), format!("{why}. {remedy}"))
}

/// Was something to be written on a file system that is mounted for reading only?
fn is_read_only(error: &(dyn std::error::Error + 'static)) -> bool {
    let cause = error.downcast_ref::<std::io::Error>();
    cause.is_some_and(|cause| cause.kind() == std::io::ErrorKind::ReadOnlyFilesystem)
        || error.source().is_some_and(is_read_only)
}

/// Where a process waits: whoever uses another directory is at another node.
pub(crate) fn place(node: &Node) -> String {
    format!("(node directory: {})", text::escape_control(&node.directory().display().to_string()))
}

/// Reads the name of a topic, and refuses here what the service of a node would.
pub(crate) fn topic_name(text: &str) -> Result<String, String> {
    let possible =
        format!("a name has 1 to {MAX_TOPIC_NAME} bytes and no control characters in it");
    match text.len() {
        1..=MAX_TOPIC_NAME if !text.chars().any(char::is_control) => Ok(text.to_owned()),
        1..=MAX_TOPIC_NAME => Err(possible),
        length => Err(format!("{possible}, this one has {length} bytes")),
    }
}

/// That there is no such device is said as everywhere else.
pub(crate) fn check_device(place: MemoryLocation) -> Result<(), Failure> {
    let MemoryLocation::Device(name) = place else { return Ok(()) };
    let opened = gpu::Device::open(name).map(drop);
    opened.map_err(|error| Failure::new(Exit::NoProvider, error.to_string()))
}

/// A topic that this process is to use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TopicRequest<'a> {
    pub(crate) node: &'a Node,
    pub(crate) name: &'a str,
    pub(crate) settings: &'a Settings,
    pub(crate) service: &'a ServiceWait,
    pub(crate) signals: &'a Signals,
}

impl TopicRequest<'_> {
    /// One that somebody made, if anybody has; unless this process is asked to end meanwhile.
    fn find(&self) -> Result<Option<Topic>, Failure> {
        let (node, name) = (self.node.clone(), self.name.to_owned());
        match self.service.ask(self.signals, move || node.open(&name))? {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some).map_err(|error| self.service.explain(error)),
        }
    }

    /// Opens it, or makes it, unless this process is asked to end meanwhile.
    fn create(&self, settings_for_new: TopicSettings) -> Result<pubsub::Result<Topic>, Failure> {
        let (node, name) = (self.node.clone(), self.name.to_owned());
        self.service.ask(self.signals, move || node.topic(&name, &settings_for_new))
    }

    /// One that publishes in a topic.
    pub(crate) fn publisher(&self, topic: Topic) -> Result<Publisher, Failure> {
        let made = self.service.ask(self.signals, move || topic.publisher())?;
        made.map_err(|error| self.service.explain(error))
    }

    /// The topic, if it exists and is to be taken as it is.
    pub(crate) fn existing(&self) -> Result<Option<Topic>, Failure> {
        if self.settings.sets_topic() { Ok(None) } else { self.find() }
    }

    /// Opens it to publish. One that exists is taken as it is, unless the settings say what
    /// it is to be like; one that is made has room for messages of this size, if they do not.
    pub(crate) fn open_to_publish(&self, size: Option<u64>) -> Result<Topic, Failure> {
        if let Some(topic) = self.existing()? {
            return Ok(topic);
        }
        let mut settings_for_new = self.settings.topic();
        check_device(settings_for_new.memory)?;
        if let (Some(size), false) = (size, self.settings.largest.is_set()) {
            settings_for_new.largest = settings_for_new.largest.max(round_up_to_4k(size));
        }
        match self.create(settings_for_new)? {
            // Somebody made it just now.
            Err(error)
                if error.kind() == ErrorKind::SettingsDiffer && !self.settings.sets_topic() =>
            {
                self.find()?.ok_or_else(|| self.service.explain(error))
            }
            made => made.map_err(|error| self.settings_error(&settings_for_new, error)),
        }
    }

    /// Opens it to read: made here, if the settings say what it is to be like, or else as
    /// soon as somebody has made it, here or at a node that this one is connected to.
    pub(crate) fn open_to_read(
        &self,
        longest: Option<Duration>,
        connectivity: &mut ConnectivityReporter,
    ) -> Result<Topic, Failure> {
        if self.settings.sets_topic() {
            let settings_for_new = self.settings.topic();
            check_device(settings_for_new.memory)?;
            return self
                .create(settings_for_new)?
                .map_err(|error| self.settings_error(&settings_for_new, error));
        }
        let (name, place) = (self.name.escape_debug(), place(self.node));
        let deadline = Deadline::after(longest);
        let mut is_reported = false;
        loop {
            if let Some(topic) = self.find()? {
                return Ok(topic);
            }
            if deadline.is_over() {
                let cause = connectivity.cause(self.node, self.name);
                let why = format!(
                    "open topic \"{name}\" failed: it exists neither on this node nor on a \
                     connected peer {place}. Start a publisher first, or create it: --largest 1MiB{cause}"
                );
                return Err(Failure::new(Exit::Deadline, why));
            }
            if !is_reported {
                is_reported = true;
                text::print_error(&format!(
                    "fabricast: waiting for topic \"{name}\": it exists neither on this node nor on a \
                     connected peer {place}"
                ));
            }
            connectivity::say(&connectivity.poll(self.node, self.name, Phase::Waiting));
            self.signals.pause(deadline.slice() / 2)?;
        }
    }

    /// It was not opened. If it is another one: in what, who wants what, and what to do.
    fn settings_error(&self, wanted: &TopicSettings, error: pubsub::Error) -> Failure {
        if error.kind() != ErrorKind::SettingsDiffer {
            return self.service.explain(error);
        }
        let found = self.find().ok().flatten();
        let there = found.and_then(|topic| topic.settings().ok());
        let why = match there.and_then(|there| difference(self.settings, wanted, &there)) {
            Some(why) => format!("open topic \"{}\" failed: {why}", self.name.escape_debug()),
            // It is gone again, or in memory that this process does not see: the service named what differs.
            None => format!("{error}. {REMEDY_OMIT}; or take {REMEDY_RENAME}"),
        };
        Failure::new(Exit::Usage, why)
    }
}

/// The settings, where they have these of the topic.
fn with_topic(settings: &Settings, topic: &TopicSettings) -> Settings {
    let mut all = settings.clone();
    all.memory.value = topic.memory;
    all.reliability.value = topic.reliability;
    all.depth.value = Count(topic.depth);
    all.largest.value = Size(topic.largest);
    all.loans.value = Count(topic.loans);
    all.release_deadline.value = topic.release_deadline;
    all
}

/// What to do about a topic that is another one.
const REMEDY_OMIT: &str = "Omit all topic settings to use it as it is";
const REMEDY_RENAME: &str = "another name. It can be recreated once no process uses it";

/// None if nothing differs, as far as this process can tell.
fn difference(
    settings: &Settings,
    wanted: &TopicSettings,
    there: &TopicSettings,
) -> Option<String> {
    let [asked, there] = [wanted, there].map(|topic| with_topic(settings, topic));
    let (mut which, mut options) = (Vec::new(), Vec::new());
    for declaration in TABLE.iter() {
        let [wants, has] = [&asked, &there].map(|settings| (declaration.write)(settings));
        if declaration.group != Group::Topic || wants == has {
            continue;
        }
        let name = declaration.name;
        let origin = declaration.origin(&asked);
        which.push(match declaration.is_set(&asked) {
            true => format!("{name} is {has}, requested was {wants} ({origin})"),
            false => format!("{name} is {has}, requested was {wants} (default)"),
        });
        options.push(format!("--{} {has}", declaration.option));
    }
    (!which.is_empty()).then(|| {
        format!(
            "settings differ: {}. {REMEDY_OMIT}, or set {}, or choose {REMEDY_RENAME}",
            which.join("; "),
            options.join(" ")
        )
    })
}

/// Rounded up to whole units of 4 KiB: more would be asked of the budget for each message of the
/// topic. Not to the system's pages: machines with others make the same topic of the same messages.
pub(crate) fn round_up_to_4k(size: u64) -> u64 {
    const UNIT: u64 = 4096;
    size.checked_next_multiple_of(UNIT).unwrap_or(size)
}

#[cfg(test)]
mod tests {
    use pubsub::Reliability;

    use super::*;

    #[test]
    fn names_of_topics_are_refused_with_what_is_possible() {
        let long = "é".repeat(101);
        assert_eq!(topic_name("camera/left"), Ok("camera/left".to_owned()));
        assert_eq!(topic_name(&long[..200]), Ok(long[..200].to_owned()));
        for (name, length) in [("", "has 0 bytes"), (&*long, "has 202 bytes")] {
            let why = topic_name(name).unwrap_err();
            assert!(why.contains("1 to 200 bytes") && why.ends_with(length), "{why}");
        }
        assert!(topic_name("a\nb").unwrap_err().ends_with("no control characters in it"));
    }

    #[test]
    fn what_differs_is_said_with_what_to_do() {
        let there = TopicSettings {
            memory: "emulated:0".parse().unwrap(),
            reliability: Reliability::DropOldest,
            depth: 4,
            largest: 1 << 16,
            loans: 1,
            release_deadline: Duration::from_millis(1500),
            type_name: None,
        };
        let mut settings = Settings::default();
        settings.largest.value = Size(4 << 20);
        settings.largest.origin = Some("option --largest".to_owned());
        let why = difference(&settings, &settings.topic(), &there).unwrap();
        for words in [
            "largest is 64KiB, and 4MiB was asked for (option --largest)",
            "depth is 4, and would be 16 where nothing is said of it",
            "loans is 1, and would be 4 where nothing is said of it",
        ] {
            assert!(why.contains(words), "{words}: {why}");
        }
        // All that there is: whoever says it gets the topic.
        let said = why.split("or say ").nth(1).and_then(|rest| rest.split(';').next()).unwrap();
        let mut options: Vec<_> = said.split(" --").collect();
        options.sort_unstable();
        let expected = [
            "--memory emulated:0",
            "depth 4",
            "largest 64KiB",
            "loans 1",
            "release-deadline 1.5",
            "reliability drop-oldest",
        ];
        assert_eq!(options, expected, "{why}");
        assert_eq!(difference(&settings, &there, &there), None);
    }

    #[test]
    fn sizes_of_new_topics_are_whole_units() {
        let sizes = [1, 4096, 4097, (64 << 20) + 1, u64::MAX].map(round_up_to_4k);
        assert_eq!(sizes, [4096, 4096, 8192, (64 << 20) + 4096, u64::MAX]);
    }
}
