//! Environment variables of the nodes and topics of `rgaps.h`.

use std::ffi::OsString;
use std::fmt;
use std::time::Duration;

use pubsub::{MemoryLocation, NodeOptions, Reliability, ServiceMode, TopicSettings};

use crate::failure::{Failure, Operation, Result};
use crate::network::network;

const DEVICE: &str = "FABRICAST_DEVICE";
// Named as the command's settings.
const MEMORY: &str = "FABRICAST_TOPIC_MEMORY";
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

/// Optional settings: `none` unsets them, as with the command's settings.
const OPTIONAL: [&str; 9] = [
    HOST_BUDGET,
    DEVICE_BUDGET,
    LABEL,
    NODE_NAME,
    "FABRICAST_LISTEN",
    "FABRICAST_PEERS",
    "FABRICAST_RENDEZVOUS",
    "FABRICAST_PROVIDER",
    "FABRICAST_SOURCE",
];
const UNSET: &str = "none";

/// The longest time, as with the command's settings: more is a mistake.
const LONGEST: Duration = Duration::from_secs(30 * 86_400);

/// Default release deadline: a program holds a message until its next pull, while it computes. Its
/// subscriber is not evicted before that time.
const DEFAULT_RELEASE_DEADLINE: Duration = Duration::from_secs(60);
const DEFAULT_LARGEST: u64 = 16 << 20;

/// The variables, and the operation for errors.
pub(super) struct Environment<F> {
    operation: Operation,
    value_of: F,
}

impl Environment<fn(&str) -> Option<OsString>> {
    /// The variables of this process.
    pub(super) fn of_process(operation: Operation) -> Self {
        Self { operation, value_of: |name| std::env::var_os(name) }
    }
}

impl<F: Fn(&str) -> Option<OsString>> Environment<F> {
    fn get(&self, name: &str) -> Result<Option<String>> {
        let value = (self.value_of)(name).filter(|value| !value.is_empty());
        let value = value.map(OsString::into_string).transpose();
        let value = value
            .map_err(|_| Failure::invalid(self.operation, format_args!("{name} is not UTF-8")))?;
        Ok(value.filter(|value| !(value == UNSET && OPTIONAL.contains(&name))))
    }

    /// Reads a variable, if it is set.
    fn read<T>(
        &self,
        name: &str,
        like: impl fmt::Display,
        meaning: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(name)? else { return Ok(None) };
        match meaning(&value) {
            Some(meant) => Ok(Some(meant)),
            None => {
                let detail = format!("{name} is \"{value}\", which is not like {like}");
                Err(Failure::invalid(self.operation, detail))
            }
        }
    }

    fn bytes(&self, name: &str) -> Result<Option<u64>> {
        self.read(name, "4096, 64K, 16M or 1G", bytes)
    }

    fn seconds(&self, name: &str) -> Result<Option<Duration>> {
        let meaning = |value: &str| {
            let time = Duration::try_from_secs_f64(value.parse().ok()?).ok();
            time.filter(|time| *time <= LONGEST)
        };
        self.read(name, "5 or 0.25, and at most a month", meaning)
    }

    /// Is an existing topic with these settings acceptable? Settings that are set must be equal, as
    /// must the memory and the reliability, which programs rely on.
    pub(super) fn allows(&self, wanted: &TopicSettings, found: &TopicSettings) -> bool {
        let is_set = |name| matches!(self.get(name), Ok(Some(_)));
        (found.memory, found.reliability) == (wanted.memory, wanted.reliability)
            && (!is_set(LARGEST) || found.largest == wanted.largest)
            && (!is_set(DEPTH) || found.depth == wanted.depth)
            && (!is_set(LOANS) || found.loans == wanted.loans)
            && (!is_set(RELEASE) || found.release_deadline == wanted.release_deadline)
    }

    pub(super) fn topic_settings(&self) -> Result<TopicSettings> {
        let defaults = TopicSettings::default();
        let name = if self.get(DEVICE)?.is_some() { DEVICE } else { MEMORY };
        let memory = self.read(name, "host or cuda:0", |value| value.parse().ok())?;
        let depth = self.read(DEPTH, "16", |value| value.parse().ok())?;
        let loans = self.read(LOANS, "4", |value| value.parse().ok())?;
        Ok(TopicSettings {
            memory: memory.unwrap_or(MemoryLocation::Host),
            reliability: Reliability::Reliable,
            depth: depth.unwrap_or(defaults.depth),
            largest: self.bytes(LARGEST)?.unwrap_or(DEFAULT_LARGEST),
            loans: loans.unwrap_or(defaults.loans),
            release_deadline: self.seconds(RELEASE)?.unwrap_or(DEFAULT_RELEASE_DEADLINE),
            type_name: None,
        })
    }

    pub(super) fn node_options(&self) -> Result<NodeOptions> {
        let mut options = NodeOptions { interruptible: true, ..NodeOptions::default() };
        options.label = self.get(LABEL)?.unwrap_or(options.label);
        options.budgets.host = self.bytes(HOST_BUDGET)?;
        options.budgets.device = self.bytes(DEVICE_BUDGET)?;
        let service = self.read(SERVICE, "embedded or external", |value| match value {
            "embedded" => Some(ServiceMode::Embedded),
            "external" => Some(ServiceMode::External),
            _ => None,
        })?;
        options.service = service.unwrap_or(options.service);
        options.service_timeout = self.seconds(SERVICE_TIMEOUT)?.unwrap_or(options.service_timeout);
        let insecure = self.read(INSECURE, "true or false", |value| value.parse().ok())?;
        let text = |field: &str| self.get(&variable_of(field));
        let how = (self.seconds(LOST_AFTER)?, insecure.unwrap_or(false), 0);
        options.network = network(self.operation, variable_of, text, how)?;
        Ok(options)
    }
}

/// The variable of a field of the node's options.
pub(super) fn variable_of(field: &str) -> String {
    match field {
        "name" => NODE_NAME.to_owned(),
        other => format!("FABRICAST_{}", other.to_uppercase()),
    }
}

/// A number of bytes, as `64K` or `64KiB`.
fn bytes(text: &str) -> Option<u64> {
    let short = text.strip_suffix("iB").filter(|short| short.ends_with(['K', 'M', 'G']));
    let short = short.unwrap_or(text);
    let units = [(['K', 'k'], 10), (['M', 'm'], 20), (['G', 'g'], 30)];
    let known =
        units.into_iter().find_map(|(unit, shift)| Some((short.strip_suffix(unit)?, shift)));
    let (number, shift) = known.unwrap_or((text, 0));
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::Status;

    fn environment(variables: &[(&str, &str)]) -> Environment<impl Fn(&str) -> Option<OsString>> {
        let value_of = |name: &str| {
            variables.iter().find(|(is, _)| *is == name).map(|(_, value)| OsString::from(value))
        };
        Environment { operation: c"test", value_of }
    }

    #[test]
    fn only_set_variables_must_match_the_topic() {
        let variables = environment(&[(LARGEST, "4K")]);
        let wanted = variables.topic_settings().unwrap();
        let by_another = TopicSettings { largest: 4096, ..TopicSettings::default() };
        assert_ne!(wanted.release_deadline, by_another.release_deadline);
        assert!(variables.allows(&wanted, &by_another));
        assert!(!variables.allows(&wanted, &TopicSettings { largest: 4097, ..by_another }));
        let drops = TopicSettings { reliability: Reliability::DropOldest, ..by_another };
        assert!(!variables.allows(&wanted, &drops));
        let memory = "emulated:0".parse().unwrap();
        assert!(!variables.allows(&wanted, &TopicSettings { memory, ..by_another }));
        let nothing = environment(&[]);
        let wanted = nothing.topic_settings().unwrap();
        assert!(nothing.allows(&wanted, &by_another));
        for (name, value) in [(DEPTH, "3"), (LOANS, "2"), (RELEASE, "7")] {
            let variables = [(name, value)];
            let variables = environment(&variables);
            assert!(!variables.allows(&variables.topic_settings().unwrap(), &by_another));
        }
    }

    #[test]
    fn none_unsets_a_variable() {
        let all: Vec<_> = OPTIONAL.into_iter().map(|name| (name, UNSET)).collect();
        let (options, defaults) = (environment(&all).node_options(), NodeOptions::default());
        let options = options.unwrap();
        assert_eq!((options.label, options.budgets), (defaults.label, defaults.budgets));
        assert_eq!(options.network, None);
    }

    #[test]
    fn variable_that_is_not_utf_8_is_an_error() {
        let value = <OsString as std::os::unix::ffi::OsStringExt>::from_vec(vec![0xff]);
        let value_of = |name: &str| (name == LABEL).then(|| value.clone());
        let failure = Environment { operation: c"test", value_of }.node_options();
        assert!(failure.unwrap_err().message().contains("FABRICAST_LABEL is not UTF-8"));
    }

    #[test]
    fn defaults_are_host_memory_and_reliable() {
        let environment = environment(&[]);
        let settings = environment.topic_settings().unwrap();
        assert_eq!(settings.memory, MemoryLocation::Host);
        assert_eq!(settings.reliability, Reliability::Reliable);
        assert_eq!(settings.largest, 16 << 20);
        assert_eq!(environment.node_options().unwrap().service, ServiceMode::Embedded);
    }

    #[test]
    fn variables_are_converted_to_settings() {
        let environment = environment(&[
            (DEVICE, "cuda:1"),
            (LARGEST, "1G"),
            (DEPTH, "4"),
            (LOANS, "1"),
            (RELEASE, "0.25"),
            (HOST_BUDGET, "64K"),
            (DEVICE_BUDGET, ""),
            (SERVICE, "external"),
            (SERVICE_TIMEOUT, "1.5"),
        ]);
        let settings = environment.topic_settings().unwrap();
        assert_eq!(settings.memory.to_string(), "cuda:1");
        assert_eq!((settings.largest, settings.depth, settings.loans), (1 << 30, 4, 1));
        assert_eq!(settings.release_deadline, Duration::from_millis(250));
        let options = environment.node_options().unwrap();
        assert_eq!((options.budgets.host, options.budgets.device), (Some(64 << 10), None));
        assert_eq!(options.service, ServiceMode::External);
        assert_eq!(options.service_timeout, Duration::from_millis(1500));
        assert_eq!(options.network, None);
    }

    #[test]
    fn network_is_set_by_variables() {
        let variables =
            [("FABRICAST_PEERS", "one:1,two:2"), (INSECURE, "true"), (LOST_AFTER, "2.5")];
        let network = environment(&variables).node_options().unwrap().network.unwrap();
        assert_eq!(network.peers, ["one:1", "two:2"]);
        assert!(network.insecure);
        assert_eq!(network.lost_after, Duration::from_millis(2500));
    }

    #[test]
    fn invalid_variable_is_named() {
        for (name, value) in
            [(DEVICE, "gpu"), (LARGEST, "many"), (LARGEST, "99999999999G"), (DEPTH, "-1")]
        {
            let failure = environment(&[(name, value)]).topic_settings().unwrap_err();
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
            let failure = environment(&[(name, value)]).node_options().unwrap_err();
            assert!(failure.message().contains(name), "{failure:?}");
        }
    }
}
