//! The errors of all crates as one type.

use std::error::Error as StdError;
use std::{fmt, io};

/// Result of calls of any of the crates.
pub type Result<T> = std::result::Result<T, Error>;

macro_rules! errors {
    ($(#[$meta:meta])* { $($(#[$about:meta])* $variant:ident($error:ty),)* }) => {
        $(#[$meta])*
        #[non_exhaustive]
        pub enum Error {
            $($(#[$about])* $variant($error),)*
        }

        impl Error {
            fn inner(&self) -> &(dyn StdError + 'static) {
                match self {
                    $(Self::$variant(error) => error,)*
                }
            }
        }

        $(
            impl From<$error> for Error {
                fn from(error: $error) -> Self {
                    Self::$variant(error)
                }
            }
        )*
    };
}

errors! {
    /// An error of any of the crates. `?` converts to it; the variant holds the original with its kind.
    ///
    /// ```
    /// use fabricast::{Error, gpu, pubsub, transfer};
    ///
    /// fn copy() -> fabricast::Result<()> {
    ///     let device = gpu::Device::open("emulated:0".parse()?)?;
    ///     let agent = transfer::Agent::start(transfer::AgentOptions::new("copies"))?;
    ///     agent.register(device.allocate_shared(4096, &[])?, transfer::Rights::READ)?;
    ///     "no place".parse::<pubsub::MemoryLocation>()?;
    ///     Ok(())
    /// }
    ///
    /// let error = copy().unwrap_err();
    /// assert!(matches!(
    ///     &error,
    ///     Error::Pubsub(original) if original.kind() == pubsub::ErrorKind::InvalidArgument
    /// ));
    /// assert!(!error.is_deadline_exceeded());
    /// println!("{error}"); // the text of the original
    /// ```
    {
        /// Of a fabric.
        Fabric(fabric::Error),
        /// Of a device.
        Gpu(gpu::Error),
        /// Of an agent, or of memory that is shared.
        Transfer(transfer::Error),
        /// Of a node or a topic.
        Pubsub(pubsub::Error),
        /// Of a group of ranks, or of their launcher.
        Launch(launch::Error),
        /// Of a channel between processes.
        Channel(ipc::ChannelError),
        /// Of a shared segment.
        Segment(ipc::SegmentError),
        /// Of an allocator in shared memory.
        Allocator(ipc::AllocatorError),
        /// Of a queue in shared memory.
        Queue(ipc::QueueError),
        /// Of the system.
        System(io::Error),
    }
}

impl Error {
    /// Did a deadline pass? The operation may still complete.
    #[must_use]
    pub fn is_deadline_exceeded(&self) -> bool {
        match self {
            Self::Fabric(error) => error.kind() == fabric::ErrorKind::DeadlineExceeded,
            Self::Gpu(error) => error.kind() == gpu::ErrorKind::DeadlineExceeded,
            Self::Transfer(error) => error.kind() == transfer::ErrorKind::DeadlineExceeded,
            Self::Pubsub(error) => error.kind() == pubsub::ErrorKind::DeadlineExceeded,
            Self::Launch(error) => error.kind() == launch::ErrorKind::DeadlineExceeded,
            Self::Channel(error) => matches!(error, ipc::ChannelError::DeadlineExceeded { .. }),
            Self::System(error) => error.kind() == io::ErrorKind::TimedOut,
            Self::Segment(_) | Self::Allocator(_) | Self::Queue(_) => false,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.inner(), f)
    }
}

/// Writes the same text as `Display`, since a program whose `main` returns the error prints this;
/// `{:#?}` prints all details.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() { fmt::Debug::fmt(self.inner(), f) } else { fmt::Display::fmt(self, f) }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.inner().source()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_all_crates_keep_kind_text_and_cause() {
        let original = gpu::Device::open("emulated:99".parse().unwrap()).unwrap_err();
        let error = Error::from(original.clone());
        assert!(matches!(&error, Error::Gpu(inner) if inner.kind() == original.kind()));
        assert_eq!(
            [error.to_string(), format!("{error:?}")],
            [(); 2].map(|()| original.to_string())
        );
        assert_eq!(error.source().is_some(), original.source().is_some());
        let late = ipc::ChannelError::DeadlineExceeded { waiting_for: "a message" };
        assert!(Error::from(late).is_deadline_exceeded());
        assert!(!Error::from(ipc::QueueError::Full).is_deadline_exceeded());
        assert!(Error::from(io::Error::from(io::ErrorKind::TimedOut)).is_deadline_exceeded());
    }
}
