//! A descriptor that is kept for the case that there is no other one left: what connects then is told so,
//! and does not take the service for a stopped one.

use std::fs::File;
use std::time::Duration;

use ipc::{Channel, ChannelListener};

/// The descriptor, as long as it is not in use.
#[derive(Debug)]
pub(super) struct Reserve(Option<File>);

impl Reserve {
    pub(super) fn new() -> Self {
        Self(open())
    }

    /// Takes what connects in spite of all, for as long as it takes to do this.
    pub(super) fn lend(&mut self, listener: &ChannelListener, refuse: impl FnOnce(Channel)) {
        self.0 = None;
        if let Ok(channel) = listener.accept(Duration::ZERO) {
            refuse(channel);
        }
        self.0 = open();
    }
}

fn open() -> Option<File> {
    File::open("/dev/null").ok()
}
