//! Settings of the nodes and topics of `rgaps.h`, from environment variables.

use std::ffi::OsString;
use std::time::Duration;

use pubsub::{MemoryLocation, Setting, Settings, TopicSettings};

use crate::failure::{Failure, Operation, Result};

/// Variable of the memory of topics, which precedes `FABRICAST_TOPIC_MEMORY`.
const DEVICE: &str = "FABRICAST_DEVICE";
/// Default release deadline: a program holds a message until its next pull, while it computes. Its
/// subscriber is not evicted before that time.
const DEFAULT_RELEASE_DEADLINE: Duration = Duration::from_secs(60);
const DEFAULT_LARGEST: u64 = 16 << 20;

/// Reads the variables; topics are always reliable.
pub(super) fn read(
    operation: Operation,
    value_of: impl Fn(&str) -> Option<OsString>,
) -> Result<Settings> {
    let mut settings = Settings::default();
    settings.node.interruptible = true;
    settings.topic.largest = DEFAULT_LARGEST;
    settings.topic.release_deadline = DEFAULT_RELEASE_DEADLINE;
    let device = value_of(DEVICE).filter(|value| !value.is_empty());
    for setting in Setting::all().iter().filter(|setting| setting.name != "topic.reliability") {
        let is_memory = setting.name == "topic.memory";
        let (variable, value) = match &device {
            Some(device) if is_memory => (DEVICE, Some(device.clone())),
            _ => (&*setting.variable, value_of(&setting.variable)),
        };
        settings.set_by_variable(setting, variable, value).map_err(|error| {
            Failure::invalid(operation, format_args!("{variable} is {}", error.detail()))
        })?;
    }
    Ok(settings)
}

/// Is an existing topic with these settings acceptable? Settings that are set must be equal, as
/// must the memory and the reliability, which programs rely on.
pub(super) fn allows(wanted: &Settings, found: &TopicSettings) -> bool {
    let by_name = |memory: MemoryLocation| match memory.device() {
        Ok(Some(name)) => MemoryLocation::Device(name),
        _ => memory,
    };
    let (mut wanted, mut existing) = (wanted.clone(), wanted.clone());
    wanted.topic.memory = by_name(wanted.topic.memory);
    existing.topic = TopicSettings { memory: by_name(found.memory), ..*found };
    Setting::all().iter().filter(|setting| setting.is_of_topics()).all(|setting| {
        let may_differ = !["topic.memory", "topic.reliability"].contains(&setting.name)
            && wanted.origin(setting.name).is_none();
        may_differ || setting.text(&wanted) == setting.text(&existing)
    })
}

#[cfg(test)]
mod tests {
    use pubsub::{NodeOptions, Reliability, ServiceMode};

    use super::*;
    use crate::status::Status;

    const LARGEST: &str = "FABRICAST_TOPIC_LARGEST";
    const DEPTH: &str = "FABRICAST_TOPIC_DEPTH";
    const LOANS: &str = "FABRICAST_TOPIC_LOANS";
    const RELEASE: &str = "FABRICAST_TOPIC_RELEASE_DEADLINE";
    const HOST_BUDGET: &str = "FABRICAST_BUDGET_HOST";
    const DEVICE_BUDGET: &str = "FABRICAST_BUDGET_DEVICE";
    const SERVICE: &str = "FABRICAST_SERVICE";
    const SERVICE_TIMEOUT: &str = "FABRICAST_SERVICE_TIMEOUT";
    const LABEL: &str = "FABRICAST_LABEL";
    const NODE_NAME: &str = "FABRICAST_NODE_NAME";
    const LOST_AFTER: &str = "FABRICAST_LOST_AFTER";
    const INSECURE: &str = "FABRICAST_INSECURE";
    /// Optional settings: `none` unsets them.
    const OPTIONAL: [&str; 11] = [
        HOST_BUDGET,
        DEVICE_BUDGET,
        LABEL,
        NODE_NAME,
        "FABRICAST_LANES",
        "FABRICAST_LISTEN",
        "FABRICAST_PEERS",
        "FABRICAST_RENDEZVOUS",
        "FABRICAST_PROVIDER",
        "FABRICAST_SOURCE",
        "FABRICAST_WORKERS",
    ];

    fn environment(variables: &[(&str, &str)]) -> Result<Settings> {
        read(c"test", |name: &str| {
            variables.iter().find(|(is, _)| *is == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn only_set_variables_must_match_the_topic() {
        let wanted = environment(&[(LARGEST, "4K")]).unwrap();
        let by_another = TopicSettings { largest: 4096, ..TopicSettings::default() };
        assert_ne!(wanted.topic.release_deadline, by_another.release_deadline);
        assert!(allows(&wanted, &by_another));
        assert!(!allows(&wanted, &TopicSettings { largest: 4097, ..by_another }));
        let drops = TopicSettings { reliability: Reliability::DropOldest, ..by_another };
        assert!(!allows(&wanted, &drops));
        let memory = "emulated:0".parse().unwrap();
        assert!(!allows(&wanted, &TopicSettings { memory, ..by_another }));
        assert!(allows(&environment(&[]).unwrap(), &by_another));
        for (name, value) in [(DEPTH, "3"), (LOANS, "2"), (RELEASE, "7")] {
            assert!(!allows(&environment(&[(name, value)]).unwrap(), &by_another));
        }
    }

    #[test]
    fn none_unsets_a_variable() {
        let all: Vec<_> = OPTIONAL.into_iter().map(|name| (name, "none")).collect();
        let (options, defaults) = (environment(&all).unwrap(), NodeOptions::default());
        let options = options.node_options();
        assert_eq!((options.label, options.budgets), (defaults.label, defaults.budgets));
        assert_eq!(options.network, None);
    }

    #[test]
    fn variable_that_is_not_utf_8_is_an_error() {
        let value = <OsString as std::os::unix::ffi::OsStringExt>::from_vec(vec![0xff]);
        for variable in [LABEL, "FABRICAST_DIRECTORY"] {
            let value_of = |name: &str| (name == variable).then(|| value.clone());
            let failure = read(c"test", value_of).unwrap_err();
            assert!(failure.message().contains(&format!("{variable} is not UTF-8")));
        }
    }

    #[test]
    fn defaults_are_host_memory_and_reliable() {
        let settings = environment(&[("FABRICAST_TOPIC_RELIABILITY", "drop-oldest")]).unwrap();
        assert_eq!(settings.topic.memory, MemoryLocation::Host);
        assert_eq!(settings.topic.reliability, Reliability::Reliable);
        assert_eq!(settings.topic.largest, 16 << 20);
        assert_eq!(settings.node.service, ServiceMode::Embedded);
    }

    #[test]
    fn variables_are_converted_to_settings() {
        let settings = environment(&[
            (DEVICE, "cuda:1"),
            ("FABRICAST_TOPIC_MEMORY", "is not read"),
            (LARGEST, "1G"),
            (DEPTH, "4"),
            (LOANS, "1"),
            (RELEASE, "0.25"),
            (HOST_BUDGET, "64K"),
            (DEVICE_BUDGET, ""),
            (SERVICE, "external"),
            (SERVICE_TIMEOUT, "1.5"),
        ])
        .unwrap();
        let topic = settings.topic;
        assert_eq!(topic.memory.to_string(), "cuda:1");
        assert_eq!((topic.largest, topic.depth, topic.loans), (1 << 30, 4, 1));
        assert_eq!(topic.release_deadline, Duration::from_millis(250));
        let options = settings.node_options();
        assert_eq!((options.budgets.host, options.budgets.device), (Some(64 << 10), None));
        assert_eq!(options.service, ServiceMode::External);
        assert_eq!(options.service_timeout, Duration::from_millis(1500));
        assert_eq!(options.network, None);
    }

    #[test]
    fn network_is_set_by_variables() {
        let settings = environment(&[
            ("FABRICAST_PEERS", "one:1,two:2"),
            (INSECURE, "true"),
            (LOST_AFTER, "2.5"),
            ("FABRICAST_LANES", "2"),
            ("FABRICAST_WORKERS", "3"),
        ]);
        let network = settings.unwrap().node_options().network.unwrap();
        assert_eq!(network.peers, ["one:1", "two:2"]);
        assert!(network.insecure);
        assert_eq!(network.lost_after, Duration::from_millis(2500));
        assert_eq!((network.lanes, network.workers), (2, 3));
    }

    #[test]
    fn invalid_variable_is_named() {
        for (name, value) in
            [(DEVICE, "gpu"), (LARGEST, "many"), (LARGEST, "99999999999G"), (DEPTH, "-1")]
        {
            let failure = environment(&[(name, value)]).unwrap_err();
            assert_eq!(failure.status, Status::InvalidArgument);
            assert!(failure.message().contains(&format!("{name} is \"{value}\"")), "{failure:?}");
        }
        for (name, value) in [
            (SERVICE, "none"),
            (SERVICE_TIMEOUT, "soon"),
            (SERVICE_TIMEOUT, "-1"),
            (SERVICE_TIMEOUT, "1e19"),
            (SERVICE_TIMEOUT, "none"),
            (INSECURE, "2"),
            (HOST_BUDGET, "G"),
        ] {
            let failure = environment(&[(name, value)]).unwrap_err();
            assert!(failure.message().contains(name), "{failure:?}");
        }
    }
}
