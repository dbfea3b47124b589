//! Resolves host names to addresses.
//!
//! Resolving blocks, so a thread does it, which starts with the first name. It cannot be
//! interrupted, so its end is not waited for.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::error::{Error, ErrorKind, Result};
use crate::wake::WakeFd;

/// Limit of tried addresses of one name.
const MAX_ADDRESSES_PER_NAME: usize = 16;

/// A name with its addresses, or with why it could not be resolved.
pub(super) type Resolution = (String, std::result::Result<Vec<SocketAddr>, String>);

#[derive(Debug)]
pub(super) struct Resolver {
    /// Each name is requested once at a time, which bounds the queue.
    requests: Option<Sender<String>>,
    answers: (Sender<Resolution>, Receiver<Resolution>),
    bell: Arc<WakeFd>,
}

impl Resolver {
    pub(super) fn new(bell: Arc<WakeFd>) -> Self {
        Self { requests: None, answers: unbounded(), bell }
    }

    /// Returns an address at once; resolves a name later.
    pub(super) fn resolve(&mut self, name: &str) -> Option<Resolution> {
        if let Ok(address) = name.parse() {
            return Some((name.to_owned(), Ok(vec![address])));
        }
        let requests = match &self.requests {
            Some(requests) => requests,
            None => match self.begin() {
                Ok(requests) => self.requests.insert(requests),
                Err(cause) => return Some((name.to_owned(), Err(cause.to_string()))),
            },
        };
        match requests.send(name.to_owned()) {
            Ok(()) => None,
            Err(_) => Some((name.to_owned(), Err("the resolver thread ended".to_owned()))),
        }
    }

    pub(super) fn next_resolution(&self) -> Option<Resolution> {
        self.answers.1.try_recv().ok()
    }

    fn begin(&self) -> std::io::Result<Sender<String>> {
        let (requests, receiver) = unbounded::<String>();
        let (answers, bell) = (self.answers.0.clone(), Arc::clone(&self.bell));
        threads::spawn("fabricast-names", move || {
            // Ends when the resolver is dropped.
            for name in receiver {
                let found = name.to_socket_addrs();
                let found = found.map(|found| found.take(MAX_ADDRESSES_PER_NAME).collect());
                let answer = (name, found.map_err(|error| error.to_string()));
                if answers.send(answer).is_err() {
                    return;
                }
                bell.ring();
            }
        })?;
        Ok(requests)
    }
}

/// Has an address the form `host:port`?
pub(crate) fn is_address(address: &str) -> bool {
    address.parse::<SocketAddr>().is_ok_and(|address| address.port() != 0)
        || address.rsplit_once(':').is_some_and(|(host, port)| {
            (1..=253).contains(&host.len())
                && !host.contains(|character: char| character.is_whitespace() || character == ':')
                && port.parse::<u16>().is_ok_and(|port| port != 0)
        })
}

/// Checks that an address has the form `host:port`.
pub(super) fn check(operation: &'static str, address: &str) -> Result<()> {
    if is_address(address) {
        return Ok(());
    }
    let detail = format!("\"{}\" is not like host:port", address.escape_debug());
    Err(Error::new(operation, ErrorKind::InvalidArgument, detail))
}
