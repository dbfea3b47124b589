//! Joins the node of a subcommand and opens topics, with remedies in the words of the command line.

use std::time::Duration;

use pubsub::{
    ErrorKind, MAX_TOPIC_NAME, MemoryLocation, Node, NodeOptions, Publisher, Setting, Settings,
    Topic, TopicSettings,
};

use super::connectivity::{self, ConnectivityReporter, Phase};
use super::exit::{Exit, Failure, Result};
use super::remedy::{check_not_a_file, directory_error};
use super::service_wait::ServiceWait;
use super::signals::{Deadline, Signals};
use super::text;

/// Options of the library from the settings; `name` is the subcommand.
pub(crate) fn options(settings: &Settings, name: &str) -> NodeOptions {
    let mut options = settings.node_options();
    if settings.node.label.is_empty() {
        options.label = format!("fabricast {name}");
    }
    options
}

/// Joins the node. Fails if a signal ends the process meanwhile.
pub(crate) fn join(
    settings: &Settings,
    options: NodeOptions,
    service: &ServiceWait,
    signals: &Signals,
) -> Result<Node> {
    check_directory(settings)?;
    check_network(settings, &options)?;
    let joined = service.ask(Some(signals), move || Node::join(options))?;
    joined.map_err(|error| service.explain(error))
}

/// Fails if an option of the network is given to a node that has none. Variables and files may set
/// it for other programs.
fn check_network(settings: &Settings, options: &NodeOptions) -> Result<()> {
    let is_option = |name: &str| settings.origin(name).is_some_and(|it| it.starts_with("option"));
    match ["provider", "source"].into_iter().find(|name| is_option(name)) {
        Some(name) if options.network.is_none() => {
            let why = format!("--{name} has no effect without --listen, --peers or --rendezvous");
            Err(Failure::new(Exit::Usage, why))
        }
        _ => Ok(()),
    }
}

/// Fails if the node directory cannot be created. Only the last component of a configured path is
/// created, so that a mistyped path is noticed.
fn check_directory(settings: &Settings) -> Result<()> {
    check_not_a_file(settings)?;
    let (directory, is_set) = (&settings.node.directory, settings.origin("directory").is_some());
    let parent = directory.parent().filter(|parent| !parent.as_os_str().is_empty());
    let Some(parent) = parent.filter(|_| is_set && !directory.exists()) else {
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
        // The library reports why.
        Err(_) => return Ok(()),
    };
    Err(directory_error(settings, &why))
}

fn is_absent(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory)
}

/// The node directory, since processes with another directory are on another node.
pub(crate) fn directory_note(node: &Node) -> String {
    format!("(node directory: {})", text::escape_control(&node.directory().display().to_string()))
}

/// Checks a topic name, as the service of a node does.
pub(crate) fn topic_name(text: &str) -> Result<String, String> {
    let possible =
        format!("a name has 1 to {MAX_TOPIC_NAME} bytes and no control characters in it");
    match text.len() {
        1..=MAX_TOPIC_NAME if !text.chars().any(char::is_control) => Ok(text.to_owned()),
        1..=MAX_TOPIC_NAME => Err(possible),
        length => Err(format!("{possible}, this one has {length} bytes")),
    }
}

/// A missing device is reported as by the other subcommands.
pub(crate) fn check_device(memory: MemoryLocation) -> Result<()> {
    // A device with a UUID may be seen by other processes only.
    let MemoryLocation::Device(name) = memory else { return Ok(()) };
    let opened = gpu::Device::open(name).map(drop);
    opened.map_err(|error| Failure::new(Exit::NoProvider, error.to_string()))
}

/// A topic to open, and what is needed for it.
#[derive(Debug)]
pub(crate) struct TopicRequest<'a> {
    node: Node,
    name: &'a str,
    settings: &'a Settings,
    service: ServiceWait,
    signals: &'a Signals,
}

impl<'a> TopicRequest<'a> {
    /// Joins the node of a subcommand. Fails if a signal ends the process meanwhile.
    pub(crate) fn join(
        settings: &'a Settings,
        subcommand: &str,
        name: &'a str,
        signals: &'a Signals,
    ) -> Result<Self> {
        let service = ServiceWait::of(&settings.node.directory);
        let node = join(settings, options(settings, subcommand), &service, signals)?;
        Ok(Self { node, name, settings, service, signals })
    }

    pub(crate) fn node(&self) -> &Node {
        &self.node
    }

    /// The topic, if it exists. Fails if a signal ends the process meanwhile.
    fn find(&self) -> Result<Option<Topic>> {
        let (node, name) = (self.node.clone(), self.name.to_owned());
        match self.service.ask(Some(self.signals), move || node.open(&name))? {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some).map_err(|error| self.service.explain(error)),
        }
    }

    /// Opens or creates the topic. Fails if a signal ends the process meanwhile.
    fn create(&self, settings_for_new: TopicSettings) -> Result<pubsub::Result<Topic>> {
        let (node, name) = (self.node.clone(), self.name.to_owned());
        self.service.ask(Some(self.signals), move || node.topic(&name, &settings_for_new))
    }

    pub(crate) fn publisher(&self, topic: Topic) -> Result<Publisher> {
        let made = self.service.ask(Some(self.signals), move || topic.publisher())?;
        made.map_err(|error| self.service.explain(error))
    }

    /// The topic, if it exists and no topic settings are set.
    pub(crate) fn existing(&self) -> Result<Option<Topic>> {
        if self.settings.sets_topic() { Ok(None) } else { self.find() }
    }

    /// Opens the topic to publish. An existing topic is used as it is, unless topic settings are
    /// set; a new one allows messages of this size, unless `largest` is set.
    pub(crate) fn open_to_publish(&self, size: Option<u64>) -> Result<Topic> {
        if let Some(topic) = self.existing()? {
            return Ok(topic);
        }
        let mut settings_for_new = self.settings.topic;
        check_device(settings_for_new.memory)?;
        if let (Some(size), false) = (size, self.settings.origin("topic.largest").is_some()) {
            settings_for_new.largest = settings_for_new.largest.max(round_up_to_4k(size));
        }
        match self.create(settings_for_new)? {
            // Another process has just created it.
            Err(error)
                if error.kind() == ErrorKind::SettingsDiffer && !self.settings.sets_topic() =>
            {
                self.find()?.ok_or_else(|| self.service.explain(error))
            }
            made => made.map_err(|error| self.settings_error(&settings_for_new, error)),
        }
    }

    /// Opens the topic to read: creates it if topic settings are set, or else waits until it
    /// exists, on this node or on a connected peer. `is_waiting` is set when that was reported.
    pub(crate) fn open_to_read(
        &self,
        longest: Option<Duration>,
        connectivity: &mut ConnectivityReporter,
        is_waiting: &mut bool,
    ) -> Result<Topic> {
        if self.settings.sets_topic() {
            let settings_for_new = self.settings.topic;
            check_device(settings_for_new.memory)?;
            let made = self.create(settings_for_new)?;
            return made.map_err(|error| self.settings_error(&settings_for_new, error));
        }
        let (name, directory_note) = (self.name.escape_debug(), directory_note(&self.node));
        let deadline = Deadline::after(longest);
        let mut is_reported = false;
        loop {
            if let Some(topic) = self.find()? {
                return Ok(topic);
            }
            if deadline.is_over() {
                let cause = connectivity.cause(&self.node, self.name);
                let why = format!(
                    "open topic \"{name}\" failed: it exists neither on this node nor on a connected peer \
                     within --timeout {directory_note}{cause}. Start a publisher first, or create it: \
                     --largest 1MiB"
                );
                return Err(Failure::new(Exit::Deadline, why));
            }
            if !is_reported {
                (is_reported, *is_waiting) = (true, true);
                text::print_error(&format!(
                    "fabricast: waiting for topic \"{name}\": it exists neither on this node nor on a connected peer \
                     {directory_note}"
                ));
            }
            connectivity::print_lines(&connectivity.poll(&self.node, self.name, Phase::Waiting));
            self.signals.pause(deadline.slice() / 2)?;
        }
    }

    /// Why the topic was not opened. If its settings differ: the differences, their origins and the
    /// remedy.
    fn settings_error(&self, wanted: &TopicSettings, error: pubsub::Error) -> Failure {
        if error.kind() != ErrorKind::SettingsDiffer {
            return self.service.explain(error);
        }
        let found = self.find().ok().flatten();
        let existing = found.and_then(|topic| topic.settings().ok());
        let why = match existing.and_then(|existing| difference(self.settings, wanted, &existing)) {
            Some(why) => format!("open topic \"{}\" failed: {why}", self.name.escape_debug()),
            // Removed again, or in memory that is not visible here: the service named the
            // difference.
            None => format!("{error}. {REMEDY_OMIT}, or choose {REMEDY_RENAME}"),
        };
        Failure::new(Exit::Usage, why)
    }
}

/// Remedies if the settings of a topic differ.
const REMEDY_OMIT: &str = "Omit all topic settings to use it as it is";
const REMEDY_RENAME: &str = "another name. It can be recreated once no process uses it";

/// The settings that differ with their origins, and the options that open the existing topic; None
/// if nothing differs, as far as this process can tell.
fn difference(
    settings: &Settings,
    wanted: &TopicSettings,
    existing: &TopicSettings,
) -> Option<String> {
    let [wanted, existing] = [wanted, existing].map(|topic| {
        let mut all = settings.clone();
        all.topic = *topic;
        all
    });
    let (mut which, mut options) = (Vec::new(), Vec::new());
    for setting in Setting::all().iter().filter(|setting| setting.is_of_topics()) {
        let (wants, has) = (setting.text(&wanted), setting.text(&existing));
        let others = |topic: &TopicSettings| (topic.depth, topic.reliability);
        let follows_others = setting.name == "topic.max_held"
            && wanted.topic.max_held == 0
            && others(&wanted.topic) != others(&existing.topic);
        if wants != has && !follows_others {
            let (name, origin) = (setting.key(), settings.origin(setting.name));
            let origin = origin.unwrap_or("default");
            which.push(format!("{name} is {has}, requested was {wants} ({origin})"));
            options.push(format!("--{} {has}", setting.option));
        }
    }
    let (which, options) = (which.join("; "), options.join(" "));
    (!which.is_empty()).then(|| {
        format!(
            "settings differ: {which}. {REMEDY_OMIT}, or set {options}, or choose {REMEDY_RENAME}"
        )
    })
}

/// Rounded up to 4 KiB: more would be reserved for each message of the topic. Not to the page size,
/// so that machines with other pages create the same topic for the same messages.
pub(crate) fn round_up_to_4k(size: u64) -> u64 {
    const UNIT: u64 = 4096;
    size.checked_next_multiple_of(UNIT).unwrap_or(size)
}

#[cfg(test)]
mod tests {
    use pubsub::Reliability;

    use super::*;

    #[test]
    fn invalid_topic_name_is_an_error_with_the_rule() {
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
    fn different_settings_are_reported_with_a_remedy() {
        let there = TopicSettings {
            memory: "emulated:0".parse().unwrap(),
            reliability: Reliability::DropOldest,
            depth: 4,
            max_held: 0,
            largest: 1 << 16,
            loans: 1,
            release_deadline: Duration::from_millis(1500),
            type_name: None,
        };
        let mut settings = Settings::default();
        let largest = Setting::all().iter().find(|one| one.name == "topic.largest").unwrap();
        settings.set(largest, "4M", "option --largest").unwrap();
        let why = difference(&settings, &settings.topic, &there).unwrap();
        for words in [
            "largest is 64KiB, requested was 4MiB (option --largest)",
            "depth is 4, requested was 16 (default)",
            "loans is 1, requested was 4 (default)",
        ] {
            assert!(why.contains(words), "{words}: {why}");
        }
        // These options open the topic.
        let advice = why.split("or set ").nth(1).and_then(|rest| rest.split(',').next()).unwrap();
        let mut options: Vec<_> = advice.split(" --").collect();
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
    fn size_of_a_new_topic_is_a_multiple_of_4_kib() {
        let sizes = [1, 4096, 4097, (64 << 20) + 1, u64::MAX].map(round_up_to_4k);
        assert_eq!(sizes, [4096, 4096, 8192, (64 << 20) + 4096, u64::MAX]);
    }
}
