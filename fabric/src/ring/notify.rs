//! How the reader of a ring is notified of chunks, and the writer of credit.

use serde::{Deserialize, Serialize};

use super::credit_format;
use crate::{Capabilities, Caps, Error, ErrorKind, Result};

/// How the reader of a ring is notified of chunks, and the writer of credit.
///
/// ```
/// use fabric::ring::NotifyMode;
/// use fabric::*;
/// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// let capabilities = offer.capabilities();
/// let mode = NotifyMode::best(capabilities)?;
/// assert_eq!(mode == NotifyMode::Immediate, capabilities.immediate_mask() > 0);
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NotifyMode {
    /// By 32 bits that arrive with the write, once it is complete.
    Immediate,
    /// By a small message, sent once the write is complete: for providers whose writes carry no
    /// immediate. Messages are tagged if the offer of the domain has [`Caps::TAGGED`]. Otherwise
    /// the application must not use messages on the same endpoint.
    Message,
}

/// Bytes of a notice that is a message.
pub(super) const NOTICE_LEN: usize = 4;
pub(super) const CREDIT_NOTICE_LEN: usize = NOTICE_LEN + credit_format::LENGTH;
/// Tag of notices, which separates them from messages of the application.
pub(super) const NOTICE_TAG: u64 = 0x5263_6e67;

/// Are notices to this endpoint tagged?
pub(super) fn has_tags(capabilities: &Capabilities) -> bool {
    capabilities.caps.contains(Caps::TAGGED)
}

impl NotifyMode {
    /// All modes.
    pub const ALL: [Self; 2] = [Self::Immediate, Self::Message];

    /// The best mode that a provider supports, by its capabilities, not its name.
    ///
    /// # Errors
    /// `NotSupported` if it supports neither immediates nor messages.
    pub fn best(capabilities: &Capabilities) -> Result<Self> {
        match Self::Immediate.check(capabilities) {
            Ok(()) => Ok(Self::Immediate),
            Err(_) => Self::Message.check(capabilities).map(|()| Self::Message),
        }
    }

    /// Does a provider support this mode?
    ///
    /// # Errors
    /// `NotSupported`, with the missing capability.
    pub fn check(self, capabilities: &Capabilities) -> Result<()> {
        let has_writes = capabilities.caps.contains(Caps::RMA);
        let all_bits = u64::from(u32::MAX);
        let lack = match self {
            _ if !has_writes => Some("no one-sided writes"),
            Self::Immediate if capabilities.immediate_mask() < all_bits => {
                Some("no immediates of 32 bits with writes")
            }
            Self::Message if !capabilities.caps.intersects(Caps::MESSAGE | Caps::TAGGED) => {
                Some("no messages")
            }
            Self::Message if capabilities.inject_size < CREDIT_NOTICE_LEN => {
                Some("no injected messages of 20 bytes")
            }
            _ => None,
        };
        let Some(lack) = lack else { return Ok(()) };
        let detail = format!("{} has {lack}", capabilities.provider);
        Err(Error::new(ErrorKind::NotSupported, "open ring", detail))
    }

    /// The mode's name on a command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Immediate => "imm",
            Self::Message => "msg",
        }
    }
}
