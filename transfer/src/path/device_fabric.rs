//! The setting whether fabrics access device memory themselves.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};

/// Permission for fabrics to access device memory themselves, without a copy through the host.
///
/// Not every provider that registers device memory delivers it before it says so. So by default the
/// transfers between two memories are probed first, when their regions are joined.
///
/// ```
/// use transfer::path::DeviceFabric;
/// assert_eq!("off".parse::<DeviceFabric>()?, DeviceFabric::Off);
/// assert_eq!(DeviceFabric::default().to_string(), "probe");
/// assert!("maybe".parse::<DeviceFabric>().is_err());
/// # Ok::<(), transfer::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceFabric {
    /// Never: device memory is copied through the host.
    Off,
    /// If probed transfers arrived whole, and before their notices.
    #[default]
    Probe,
    /// Wherever the provider registers it, without a probe. A peer may insist on one.
    On,
}

impl DeviceFabric {
    /// The environment variable that sets it for topics, and for all agents whose program does not.
    pub const VARIABLE: &'static str = "FABRICAST_DEVICE_FABRIC";

    /// The value's name in settings and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Probe => "probe",
            Self::On => "on",
        }
    }

    /// The value of the environment, or the default.
    ///
    /// # Errors
    /// `Malformed` for another value than those of [`name`](Self::name).
    pub fn from_environment() -> Result<Self> {
        match std::env::var_os(Self::VARIABLE).filter(|value| !value.is_empty()) {
            None => Ok(Self::default()),
            Some(value) => value.to_string_lossy().parse(),
        }
    }
}

impl fmt::Display for DeviceFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DeviceFabric {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let all = [Self::Off, Self::Probe, Self::On];
        all.into_iter().find(|one| one.name() == text.trim()).ok_or_else(|| {
            let name = Self::VARIABLE;
            let detail = format!("{name} is \"{}\". Choose off, probe or on", text.escape_debug());
            Error::new("parse setting", ErrorKind::Malformed, detail)
        })
    }
}
