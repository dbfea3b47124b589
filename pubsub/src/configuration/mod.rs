//! All settings of a process: declared once, for the environment, the settings file, the command
//! line and the documentation.

mod declarations;
mod setting;
mod value;
mod variables;

use std::collections::BTreeMap;
use std::ffi::OsString;

use crate::error::{Error, ErrorKind, Result};
use crate::network_options::NetworkOptions;
use crate::node_options::NodeOptions;
use crate::settings::TopicSettings;

pub use self::setting::{Form, Setting};
pub use self::value::{parse_seconds, parse_size, print_size};
pub use self::variables::UnknownVariable;

const OPERATION: &str = "read environment variable";

/// The values of all settings, and the origins of those that are set.
///
/// ```
/// use pubsub::{Setting, Settings};
/// let mut settings = Settings::default();
/// let depth = Setting::all().iter().find(|setting| setting.name == "topic.depth").unwrap();
/// settings.set(depth, "32", "option --depth").unwrap();
/// assert_eq!(settings.topic.depth, 32);
/// assert_eq!(settings.origin("topic.depth"), Some("option --depth"));
/// assert_eq!(settings.set(depth, "0", "option --depth"), Err("use 1 to 65536".to_owned()));
/// ```
#[derive(Debug, Clone)]
pub struct Settings {
    /// Options of the node, without its network; the label is empty if it is not set.
    pub node: NodeOptions,
    /// Options of connections with other nodes, if there are any.
    pub network: NetworkOptions,
    /// Settings of a new topic.
    pub topic: TopicSettings,
    origins: BTreeMap<&'static str, String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            node: NodeOptions { label: String::new(), ..NodeOptions::default() },
            network: NetworkOptions::default(),
            topic: TopicSettings::default(),
            origins: BTreeMap::new(),
        }
    }
}

impl Settings {
    /// The defaults, changed by the variables of the environment for nodes. Those of topics are not
    /// read: a program passes their settings as [`TopicSettings`].
    ///
    /// # Errors
    /// As [`NodeOptions::from_environment`].
    pub fn from_environment() -> Result<Self> {
        UnknownVariable::refuse_misspelt()?;
        Self::from_variables(|name| std::env::var_os(name))
    }

    fn from_variables(value_of: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let mut settings = Self::default();
        for setting in Setting::all().iter().filter(|setting| !setting.is_of_topics()) {
            settings.set_by_variable(setting, &setting.variable, value_of(&setting.variable))?;
        }
        let options = settings.node_options();
        options.network.map_or(Ok(()), |network| network.check(&options.label))?;
        Ok(settings)
    }

    /// Sets a setting to the value of a variable, if that is set and not empty.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument), with the variable as the
    /// [subject](Error::subject). The [detail](Error::detail) is the value and what is expected.
    pub fn set_by_variable(
        &mut self,
        setting: &Setting,
        variable: &str,
        value: Option<OsString>,
    ) -> Result<()> {
        let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(()) };
        let origin = format!("environment {variable}");
        let set = match value.to_str() {
            None => Err("not UTF-8".to_owned()),
            Some(text) => self
                .set(setting, text, &origin)
                .map_err(|expected| format!("\"{}\": {expected}", text.escape_debug())),
        };
        set.map_err(|why| Error::new(OPERATION, ErrorKind::InvalidArgument, why).at(variable))
    }

    /// Sets a setting to the value that a text of this origin stands for.
    ///
    /// # Errors
    /// What is expected.
    pub fn set(
        &mut self,
        setting: &Setting,
        text: &str,
        origin: &str,
    ) -> std::result::Result<(), String> {
        (setting.read)(self, text)?;
        self.origins.insert(setting.name, origin.to_owned());
        Ok(())
    }

    /// The origin of the value of the setting of this name, if it is set.
    #[must_use]
    pub fn origin(&self, name: &str) -> Option<&str> {
        self.origins.get(name).map(String::as_str)
    }

    /// Is any setting of topics set?
    #[must_use]
    pub fn sets_topic(&self) -> bool {
        Setting::all().iter().any(|one| one.is_of_topics() && self.origin(one.name).is_some())
    }

    /// The options of the node: with a network, if an address is set at which the node listens or
    /// which it dials.
    #[must_use]
    pub fn node_options(&self) -> NodeOptions {
        let mut options = self.node.clone();
        if options.label.is_empty() {
            options.label = NodeOptions::default().label;
        }
        options.network = self.network.first_address().map(|_| self.network.clone());
        options
    }
}

impl NodeOptions {
    /// The default options, changed by the variables of the environment that
    /// `docs/reference/settings.md` lists, except those of topics.
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
    /// and for an unknown variable that resembles a known one, with the nearest. Also for a network
    /// that can never work.
    pub fn from_environment() -> Result<Self> {
        Ok(Settings::from_environment()?.node_options())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::setting::PREFIX;
    use super::*;
    use crate::node_options::ServiceMode;

    fn read(set: &[(&str, &str)]) -> Result<NodeOptions> {
        let settings = Settings::from_variables(|name| {
            let found = set.iter().find(|(set, _)| Some(*set) == name.strip_prefix(PREFIX));
            found.map(|(_, text)| (*text).into())
        })?;
        Ok(settings.node_options())
    }

    #[test]
    fn environment_without_variables_leaves_the_defaults() {
        let (found, usual) = (read(&[]).unwrap(), NodeOptions::default());
        assert_eq!(format!("{found:?}"), format!("{usual:?}"));
        let found = read(&[("LABEL", ""), ("PROVIDER", "tcp"), ("PEERS", "none")]).unwrap();
        assert_eq!(format!("{found:?}"), format!("{usual:?}"), "no other node is named");
        let unset = [("LABEL", "none"), ("NODE_NAME", "none"), ("BUDGET_HOST", "none")];
        let found = read(&unset).unwrap();
        assert_eq!(format!("{found:?}"), format!("{usual:?}"), "none unsets");
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
    fn invalid_value_is_rejected_with_its_variable() {
        let long = "x".repeat(65);
        for (name, text) in [
            ("LABEL", "a\nb"),
            ("NODE_NAME", &*long),
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
            ("RENDEZVOUS", "a:0"),
            ("LOST_AFTER", "0.01"),
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
