//! Node options from environment variables.

use std::env::VarError;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::network_options::NetworkOptions;
use crate::node_options::{NodeOptions, ServiceMode};

const OPERATION: &str = "read environment variable";
const PREFIX: &str = "FABRICAST_";
/// The value of an optional variable that means unset.
const NONE: &str = "none";
const MONTH: f64 = 30.0 * 86_400.0;

/// All known variables, sorted: those of [`NodeOptions::from_environment`], of the command
/// `fabricast` and of the C library.
pub const KNOWN_VARIABLES: [&str; 28] = [
    "FABRICAST_BUDGET_DEVICE",
    "FABRICAST_BUDGET_HOST",
    "FABRICAST_CONFIG",
    "FABRICAST_DEVICE",
    "FABRICAST_DEVICE_FABRIC",
    "FABRICAST_DIRECTORY",
    "FABRICAST_INSECURE",
    "FABRICAST_LABEL",
    "FABRICAST_LANES",
    "FABRICAST_LAUNCHER",
    "FABRICAST_LISTEN",
    "FABRICAST_LOG",
    "FABRICAST_LOST_AFTER",
    "FABRICAST_NODE_NAME",
    "FABRICAST_SERVICE_TIMEOUT",
    "FABRICAST_PEERS",
    "FABRICAST_PMIX_LIBRARY",
    "FABRICAST_PROVIDER",
    "FABRICAST_RENDEZVOUS",
    "FABRICAST_SERVICE",
    "FABRICAST_SOURCE",
    "FABRICAST_TOPIC_DEPTH",
    "FABRICAST_TOPIC_LARGEST",
    "FABRICAST_TOPIC_LOANS",
    "FABRICAST_TOPIC_MEMORY",
    "FABRICAST_TOPIC_RELEASE_DEADLINE",
    "FABRICAST_TOPIC_RELIABILITY",
    "FABRICAST_WORKERS",
];

/// The variable that a misspelt name most likely stands for: the known one with the fewest
/// different letters, if these are few. The group's name is ignored, since a setting of topics is
/// often sought among the others.
///
/// ```
/// let known = ["FABRICAST_LABEL", "FABRICAST_TOPIC_DEPTH"];
/// let nearest = |name| pubsub::nearest_variable(name, known);
/// assert_eq!(nearest("FABRICAST_DEPHT"), Some("FABRICAST_TOPIC_DEPTH"));
/// assert_eq!(nearest("FABRICAST_UNRELATED"), None);
/// ```
pub fn nearest_variable<'a>(
    name: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    /// Beyond it a long name is another one: Kubernetes sets `FABRICAST_SERVICE_HOST` for a service
    /// that is called so.
    const MAX_DISTANCE: usize = 4;
    fn setting(name: &str) -> &str {
        let name = name.strip_prefix(PREFIX).unwrap_or(name);
        name.strip_prefix("TOPIC_").unwrap_or(name)
    }
    let distance = |near: &str| strsim::osa_distance(setting(name), setting(near));
    let near = known.into_iter().min_by_key(|near| distance(near))?;
    (distance(near) <= (setting(near).len() / 3).min(MAX_DISTANCE)).then_some(near)
}

/// A parsed value, or what was expected.
type Read<T> = std::result::Result<T, String>;
/// Looks a variable up.
type Lookup<'a> = &'a dyn Fn(&str) -> std::result::Result<String, VarError>;

impl NodeOptions {
    /// The default options, changed by these variables of the environment only. The command
    /// `fabricast` reads them, too.
    ///
    /// | variable | sets |
    /// |---|---|
    /// | `FABRICAST_DIRECTORY`, `FABRICAST_LABEL` | [`directory`](Self::directory), [`label`](Self::label) |
    /// | `FABRICAST_SERVICE` | [`service`](Self::service): `embedded` or `external` |
    /// | `FABRICAST_SERVICE_TIMEOUT` | [`service_timeout`](Self::service_timeout), in seconds |
    /// | `FABRICAST_BUDGET_HOST`, `FABRICAST_BUDGET_DEVICE` | [`budgets`](Self::budgets), with K, M, G, KiB, MiB or GiB |
    /// | `FABRICAST_LISTEN`, `FABRICAST_PEERS`, `FABRICAST_RENDEZVOUS` | [`network`](Self::network): addresses of this node and others; peers separated by commas |
    /// | `FABRICAST_INSECURE` | `true`: connect to other nodes although they are not authenticated |
    /// | `FABRICAST_NODE_NAME`, `FABRICAST_PROVIDER`, `FABRICAST_SOURCE`, `FABRICAST_LANES`, `FABRICAST_WORKERS`, `FABRICAST_LOST_AFTER` | the rest of [`NetworkOptions`](crate::NetworkOptions) |
    ///
    /// `FABRICAST_TOPIC_…` are read by the command and the C library only: a Rust program passes
    /// the settings of a topic as [`TopicSettings`](crate::TopicSettings). These,
    /// `FABRICAST_CONFIG`, `FABRICAST_LOG`, `FABRICAST_DEVICE` and `FABRICAST_DEVICE_FABRIC`
    /// ([`KNOWN_VARIABLES`]) are ignored
    /// here. Any other variable that begins with `FABRICAST_` and resembles one of these is
    /// rejected as misspelt.
    ///
    /// ```
    /// use pubsub::NodeOptions;
    /// let options = NodeOptions::from_environment()?;
    /// assert!(!options.directory.as_os_str().is_empty());
    /// # Ok::<(), pubsub::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument), with the variable, for an invalid value,
    /// and for an unknown variable, with the nearest known one.
    pub fn from_environment() -> Result<Self> {
        check_names(std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()))?;
        Self::from_variables(&|name| std::env::var(name))
    }

    fn from_variables(lookup: Lookup<'_>) -> Result<Self> {
        let variables = Variables(lookup);
        let mut options = Self::default();
        variables.set("DIRECTORY", &mut options.directory, parsed("a path"))?;
        variables.set("LABEL", &mut options.label, text)?;
        variables.set("SERVICE", &mut options.service, |text| match text {
            "embedded" => Ok(ServiceMode::Embedded),
            "external" => Ok(ServiceMode::External),
            _ => Err("embedded or external is expected".to_owned()),
        })?;
        variables.set("SERVICE_TIMEOUT", &mut options.service_timeout, seconds)?;
        variables.set("BUDGET_HOST", &mut options.budgets.host, optional(size))?;
        variables.set("BUDGET_DEVICE", &mut options.budgets.device, optional(size))?;
        options.budgets.check()?;

        let network = NetworkOptions::from_variables(&variables)?;
        // The other options need a listener, a peer or a rendezvous.
        if network.listen.is_some() || !network.peers.is_empty() || network.rendezvous.is_some() {
            network.check(&options.label)?;
            options.network = Some(network);
        }
        Ok(options)
    }
}

impl NetworkOptions {
    /// The default options, changed by the variables of [`NodeOptions::from_environment`] for them,
    /// whether or not these name a listener or peers.
    ///
    /// ```
    /// use pubsub::NetworkOptions;
    /// let network = NetworkOptions::from_environment()?;
    /// println!("{:?}", network.source);
    /// # Ok::<(), pubsub::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`NodeOptions::from_environment`].
    pub fn from_environment() -> Result<Self> {
        check_names(std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()))?;
        Self::from_variables(&Variables(&|name| std::env::var(name)))
    }

    fn from_variables(variables: &Variables<'_>) -> Result<Self> {
        let mut network = Self::default();
        let endpoint = "an address with a port, like 10.0.0.1:7700, is expected";
        variables.set("LISTEN", &mut network.listen, optional(parsed(endpoint)))?;
        variables.set("PEERS", &mut network.peers, list)?;
        variables.set("RENDEZVOUS", &mut network.rendezvous, optional(text))?;
        variables.set("INSECURE", &mut network.insecure, parsed("true or false is expected"))?;
        variables.set("NODE_NAME", &mut network.name, text)?;
        variables.set("PROVIDER", &mut network.provider, optional(text))?;
        variables.set("SOURCE", &mut network.source, optional(local_address))?;
        variables.set("LANES", &mut network.lanes, count(Self::MAX_LANES))?;
        variables.set("WORKERS", &mut network.workers, count(Self::MAX_WORKERS))?;
        variables.set("LOST_AFTER", &mut network.lost_after, seconds)?;
        Ok(network)
    }
}

/// Rejects the first variable with the prefix that is unknown, but resembles a known one.
fn check_names(names: impl Iterator<Item = String>) -> Result<()> {
    let is_unknown =
        |name: &String| name.starts_with(PREFIX) && !KNOWN_VARIABLES.contains(&&**name);
    // An unrelated name belongs to another program, for instance to a Kubernetes service.
    let near = |name: String| Some((nearest_variable(&name, KNOWN_VARIABLES)?, name));
    let Some((near, name)) = names.filter(is_unknown).filter_map(near).min_by(|a, b| a.1.cmp(&b.1))
    else {
        return Ok(());
    };
    let name = name.escape_debug().to_string();
    let detail =
        format!("{name} is unknown; the nearest variable is {near}. Correct its name, or unset it");
    Err(Error::new(OPERATION, ErrorKind::InvalidArgument, detail).at(name))
}

/// The variables of a process.
struct Variables<'a>(Lookup<'a>);

impl Variables<'_> {
    /// Sets a value from its variable, if that is set and not empty.
    fn set<T>(&self, name: &str, value: &mut T, read: impl Fn(&str) -> Read<T>) -> Result<()> {
        let name = format!("{PREFIX}{name}");
        let refused = |reason: &str| {
            Err(Error::new(OPERATION, ErrorKind::InvalidArgument, reason).at(name.as_str()))
        };
        match (self.0)(&name) {
            Ok(text) if text.is_empty() => Ok(()),
            Ok(text) => match read(&text) {
                Ok(found) => {
                    *value = found;
                    Ok(())
                }
                Err(reason) => refused(&format!("\"{}\": {reason}", text.escape_debug())),
            },
            Err(VarError::NotPresent) => Ok(()),
            Err(VarError::NotUnicode(_)) => refused("the value is not UTF-8"),
        }
    }
}

fn parsed<T: FromStr>(expected: &str) -> impl Fn(&str) -> Read<T> {
    move |text| text.parse().map_err(|_| expected.to_owned())
}

fn optional<T>(read: impl Fn(&str) -> Read<T>) -> impl Fn(&str) -> Read<Option<T>> {
    move |text| if text == NONE { Ok(None) } else { read(text).map(Some) }
}

fn local_address(text: &str) -> Read<IpAddr> {
    fabric::local_address(text).map_err(|error| error.detail().unwrap_or_default().to_owned())
}

fn text(text: &str) -> Read<String> {
    match text.contains(char::is_control) {
        true => Err("control characters are not allowed".to_owned()),
        false => Ok(text.to_owned()),
    }
}

fn list(all: &str) -> Read<Vec<String>> {
    if all == NONE {
        return Ok(Vec::new());
    }
    let element = |one: &str| match one.trim() {
        "" => Err("one of the addresses is empty".to_owned()),
        one => text(one),
    };
    all.split(',').map(element).collect()
}

fn seconds(text: &str) -> Read<Duration> {
    let seconds = text.parse().ok().filter(|seconds| (0.0..=MONTH).contains(seconds));
    let seconds = seconds.map(Duration::from_secs_f64);
    seconds.ok_or_else(|| "a number of seconds, a month at most, is expected".to_owned())
}

fn size(text: &str) -> Read<u64> {
    let short = text.strip_suffix("iB").filter(|short| short.ends_with(['K', 'M', 'G']));
    let short = short.unwrap_or(text);
    let units = [(['K', 'k'], 10), (['M', 'm'], 20), (['G', 'g'], 30)];
    let scaled = |(unit, shift)| Some((short.strip_suffix(unit)?, shift));
    let (digits, shift) = units.into_iter().find_map(scaled).unwrap_or((text, 0));
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.parse::<u64>().ok().filter(|_| is_number);
    let bytes = number.and_then(|number| number.checked_mul(1 << shift));
    bytes.ok_or_else(|| "a number with an optional K, M or G is expected".to_owned())
}

fn count(most: u32) -> impl Fn(&str) -> Read<usize> {
    move |text| match text.parse() {
        _ if text == NONE => Ok(0),
        Ok(number) if (1..=most as usize).contains(&number) && !text.starts_with('+') => Ok(number),
        _ => Err(format!("1 to {most} is possible")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(set: &[(&str, &str)]) -> Result<NodeOptions> {
        NodeOptions::from_variables(&|name| {
            let found = set.iter().find(|(set, _)| Some(*set) == name.strip_prefix(PREFIX));
            found.map(|(_, text)| (*text).to_owned()).ok_or(VarError::NotPresent)
        })
    }

    #[test]
    fn environment_without_variables_leaves_the_defaults() {
        let (found, usual) = (read(&[]).unwrap(), NodeOptions::default());
        assert_eq!(format!("{found:?}"), format!("{usual:?}"));
        let found = read(&[("LABEL", ""), ("PROVIDER", "tcp"), ("PEERS", "none")]).unwrap();
        assert_eq!(format!("{found:?}"), format!("{usual:?}"), "no other node is named");
    }

    #[test]
    fn environment_sets_every_option() {
        let options = read(&[
            ("DIRECTORY", "/run/app"),
            ("LABEL", "camera"),
            ("SERVICE", "external"),
            ("SERVICE_TIMEOUT", "1.5"),
            ("BUDGET_HOST", "64M"),
            ("BUDGET_DEVICE", "1G"),
            ("LISTEN", "127.0.0.1:7700"),
            ("PEERS", "127.0.0.1:7701, localhost:7702"),
            ("RENDEZVOUS", "127.0.0.1:7703"),
            ("INSECURE", "true"),
            ("NODE_NAME", "robot"),
            ("PROVIDER", "tcp"),
            ("SOURCE", "127.0.0.0/8"),
            ("LANES", "2"),
            ("WORKERS", "3"),
            ("LOST_AFTER", "7"),
        ]);
        let options = options.unwrap();
        assert_eq!((options.directory.to_str(), &*options.label), (Some("/run/app"), "camera"));
        assert_eq!(options.service, ServiceMode::External);
        assert_eq!(options.service_timeout, Duration::from_millis(1500));
        assert_eq!((options.budgets.host, options.budgets.device), (Some(64 << 20), Some(1 << 30)));
        let expected = NetworkOptions {
            listen: Some("127.0.0.1:7700".parse().unwrap()),
            peers: vec!["127.0.0.1:7701".to_owned(), "localhost:7702".to_owned()],
            rendezvous: Some("127.0.0.1:7703".to_owned()),
            insecure: true,
            name: "robot".to_owned(),
            provider: Some("tcp".to_owned()),
            source: Some("127.0.0.1".parse().unwrap()),
            lost_after: Duration::from_secs(7),
            workers: 3,
            lanes: 2,
        };
        assert_eq!(options.network, Some(expected));
    }

    #[test]
    fn misspelt_variable_is_rejected_with_the_nearest_known() {
        let check = |names: &[&str]| check_names(names.iter().map(|name| (*name).to_owned()));
        let unlike = [
            "FABRICAST_SERVICE_HOST",
            "FABRICAST_SERVICE_PORT",
            "FABRICAST_PORT_7700_TCP_ADDR",
            "FABRICAST_GIT_COMMIT",
            "FABRICAST_TEST_DEVICE",
        ];
        check(&[&KNOWN_VARIABLES[..], &unlike, &["HOME", "MY_FABRICAST_DIRECTRY"]].concat())
            .unwrap();

        let error = check(&["FABRICAST_LABLE", "HOME", "FABRICAST_DIRECTRY"]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(
            error.to_string(),
            "read environment variable FABRICAST_DIRECTRY failed: invalid argument: \
             FABRICAST_DIRECTRY is unknown; the nearest variable is \
             FABRICAST_DIRECTORY. Correct its name, or unset it"
        );
    }

    #[test]
    fn read_variables_are_known_and_documented() {
        let names = std::cell::RefCell::new(Vec::new());
        NodeOptions::from_variables(&|name| {
            names.borrow_mut().push(name.to_owned());
            Err(VarError::NotPresent)
        })
        .unwrap();
        let page = include_str!("../../../docs/reference/settings.md");
        for name in names.into_inner() {
            assert!(KNOWN_VARIABLES.contains(&&*name), "{name}");
            assert!(page.contains(&format!("`{name}`")), "{name} in docs/reference/settings.md");
        }
    }

    #[test]
    fn invalid_value_is_rejected_with_its_variable() {
        for (name, text) in [
            ("LABEL", "a\nb"),
            ("SERVICE", "dedicated"),
            ("SERVICE_TIMEOUT", "-1"),
            ("SERVICE_TIMEOUT", "NaN"),
            ("BUDGET_HOST", "+5"),
            ("BUDGET_HOST", "18446744073709551615G"),
            ("BUDGET_DEVICE", "K"),
            ("LISTEN", "localhost"),
            ("PEERS", "a:1,,b:2"),
            ("INSECURE", "yes"),
            ("SOURCE", "10.0.0.1:7"),
            ("LANES", "0"),
            ("WORKERS", "+1"),
        ] {
            let error = read(&[(name, text)]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{name}={text}");
            assert_eq!(error.subject(), Some(&*format!("{PREFIX}{name}")), "{error}");
        }
        // The options themselves reject these.
        assert!(read(&[("BUDGET_HOST", "1")]).is_err());
        assert!(read(&[("LISTEN", "0.0.0.0:7700")]).is_err(), "without FABRICAST_INSECURE");
    }
}
