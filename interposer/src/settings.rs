//! Settings, from the environment. A program that preloads this library has no other place for them.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use collective::Operation;

/// Operations that can be carried out by this project, in the order of the documentation.
const OPERATIONS: [Operation; 8] = [
    Operation::AllGather,
    Operation::AllReduce,
    Operation::Broadcast,
    Operation::Reduce,
    Operation::ReduceScatter,
    Operation::AllToAll,
    Operation::Gather,
    Operation::Scatter,
];

/// Which library carries out operations, if it is not measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Forced {
    Ours,
    Nccl,
}

/// Where the report goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Destination {
    StandardError,
    File(PathBuf),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Settings {
    is_on: bool,
    /// One bit for each operation, by its number.
    operations: u16,
    forced: Option<Forced>,
    report: Option<Destination>,
    composes_all_to_all: bool,
    join_timeout: Duration,
}

impl Settings {
    /// The settings of variables, and a warning for each that is malformed.
    fn parse(get: impl Fn(&str) -> Option<String>) -> (Self, Vec<String>) {
        let mut warnings = Vec::new();
        let mut read = |name: &'static str, allowed: &str, accept: &mut dyn FnMut(&str) -> bool| {
            let Some(value) = get(name).filter(|value| !value.is_empty()) else { return };
            if !accept(&value) {
                warnings.push(format!(
                    "fabricast: {name}={value} is ignored: the value is not {allowed}"
                ));
            }
        };
        let mut settings = Self {
            is_on: true,
            operations: bits(&OPERATIONS),
            forced: None,
            report: None,
            composes_all_to_all: false,
            join_timeout: Duration::from_secs(5),
        };
        read("FABRICAST_NCCL", "\"on\" or \"off\"", &mut |value| {
            set(&mut settings.is_on, switch(value))
        });
        let names = OPERATIONS.map(Operation::name).join(", ");
        let allowed = format!("\"all\", \"none\" or a list of {names}");
        read("FABRICAST_NCCL_OPERATIONS", &allowed, &mut |value| {
            set(&mut settings.operations, operations(value))
        });
        read("FABRICAST_NCCL_FORCE", "\"ours\" or \"nccl\"", &mut |value| {
            let forced = match value {
                "ours" => Some(Forced::Ours),
                "nccl" => Some(Forced::Nccl),
                _ => return false,
            };
            settings.forced = forced;
            true
        });
        read("FABRICAST_NCCL_REPORT", "0, 1 or a path with a \"/\"", &mut |value| {
            settings.report = match value {
                "0" => None,
                "1" => Some(Destination::StandardError),
                path if path.contains('/') => Some(Destination::File(path.into())),
                _ => return false,
            };
            true
        });
        read("FABRICAST_NCCL_SEND_RECV", "0 or 1", &mut |value| {
            set(&mut settings.composes_all_to_all, switch(value))
        });
        read("FABRICAST_NCCL_JOIN_TIMEOUT", "a number of seconds from 0 to 600", &mut |value| {
            let seconds = value.parse::<f64>().ok().filter(|it| (0.0..=600.0).contains(it));
            set(&mut settings.join_timeout, seconds.map(Duration::from_secs_f64))
        });
        (settings, warnings)
    }

    pub(crate) fn is_on(&self) -> bool {
        self.is_on
    }

    pub(crate) fn allows(&self, operation: Operation) -> bool {
        self.operations >> (operation as u8) & 1 == 1
    }

    pub(crate) fn forced(&self) -> Option<Forced> {
        self.forced
    }

    pub(crate) fn report(&self) -> Option<&Destination> {
        self.report.as_ref()
    }

    /// Returns whether sends and receives of a group may become an all-to-all.
    pub(crate) fn composes_all_to_all(&self) -> bool {
        self.composes_all_to_all
    }

    /// How long a rank waits for the others, when a communicator is made.
    pub(crate) fn join_timeout(&self) -> Duration {
        self.join_timeout
    }

    /// A number that is the same for settings by which ranks decide alike.
    pub(crate) fn digest(&self) -> u64 {
        let forced = match self.forced {
            None => 0,
            Some(Forced::Ours) => 1,
            Some(Forced::Nccl) => 2,
        };
        u64::from(self.operations) | forced << 16 | u64::from(self.composes_all_to_all) << 18
    }
}

fn set<T>(place: &mut T, value: Option<T>) -> bool {
    let is_valid = value.is_some();
    if let Some(value) = value {
        *place = value;
    }
    is_valid
}

fn switch(value: &str) -> Option<bool> {
    match value {
        "on" | "1" => Some(true),
        "off" | "0" => Some(false),
        _ => None,
    }
}

fn bits(operations: &[Operation]) -> u16 {
    operations.iter().fold(0, |bits, operation| bits | 1 << (*operation as u8))
}

fn operations(value: &str) -> Option<u16> {
    match value {
        "all" => return Some(bits(&OPERATIONS)),
        "none" => return Some(0),
        _ => {}
    }
    let named = |name: &str| OPERATIONS.into_iter().find(|known| known.name() == name.trim());
    let all: Option<Vec<Operation>> = value.split(',').map(named).collect();
    all.map(|all| bits(&all))
}

/// Those of this process, read once. Warnings go to standard error.
pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let (settings, warnings) = Settings::parse(|name| std::env::var(name).ok());
        warnings.iter().for_each(|warning| eprintln!("{warning}"));
        settings
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(variables: &[(&str, &str)]) -> (Settings, Vec<String>) {
        Settings::parse(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn valid_variables_are_taken_without_warnings() {
        let (settings, warnings) = parse(&[
            ("FABRICAST_NCCL", "off"),
            ("FABRICAST_NCCL_OPERATIONS", "all-gather, broadcast"),
            ("FABRICAST_NCCL_FORCE", "ours"),
            ("FABRICAST_NCCL_REPORT", "/tmp/report"),
            ("FABRICAST_NCCL_SEND_RECV", "1"),
            ("FABRICAST_NCCL_JOIN_TIMEOUT", "0.5"),
        ]);
        assert!(warnings.is_empty(), "{warnings:?}");
        assert!(!settings.is_on() && settings.composes_all_to_all());
        let allowed = OPERATIONS.into_iter().filter(|it| settings.allows(*it));
        assert_eq!(allowed.collect::<Vec<_>>(), [Operation::AllGather, Operation::Broadcast]);
        assert_eq!(settings.forced(), Some(Forced::Ours));
        assert_eq!(settings.report(), Some(&Destination::File("/tmp/report".into())));
        assert_eq!(settings.join_timeout(), Duration::from_millis(500));
    }

    #[test]
    fn malformed_variables_give_a_warning_and_the_default() {
        let names = ["", "_OPERATIONS", "_FORCE", "_REPORT", "_SEND_RECV", "_JOIN_TIMEOUT"];
        let names = names.map(|name| format!("FABRICAST_NCCL{name}"));
        let (default, _) = parse(&[]);
        for name in &names {
            let (settings, warnings) = parse(&[(name, "all-gather,everything")]);
            assert_eq!(settings, default);
            let [warning] = &warnings[..] else { panic!("{warnings:?}") };
            assert!(warning.contains(&format!("{name}=all-gather,everything")), "{warning}");
            assert!(warning.contains("is not"), "{warning}");
        }
    }

    #[test]
    fn settings_by_which_ranks_decide_have_different_digests() {
        let of = |name, value| parse(&[(name, value)]).0.digest();
        let all = [
            of("FABRICAST_NCCL", "on"),
            of("FABRICAST_NCCL_OPERATIONS", "none"),
            of("FABRICAST_NCCL_OPERATIONS", "reduce"),
            of("FABRICAST_NCCL_FORCE", "ours"),
            of("FABRICAST_NCCL_FORCE", "nccl"),
            of("FABRICAST_NCCL_SEND_RECV", "1"),
        ];
        let different: std::collections::BTreeSet<u64> = all.into_iter().collect();
        assert_eq!(different.len(), all.len());
        assert_eq!(all[0], of("FABRICAST_NCCL_REPORT", "1"));
    }
}
