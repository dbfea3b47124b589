//! Names of hosts to addresses.
//!
//! The system answers when it likes, so a thread asks that is made when there is first a
//! name. It cannot be called back, so nobody waits for its end.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::error::{Error, ErrorKind, Result};
use crate::wake::WakeFd;

/// Addresses of one name that are tried.
const MAX_ADDRESSES_PER_NAME: usize = 16;

/// What a name stands for, or why that cannot be told.
pub(super) type Resolution = (String, std::result::Result<Vec<SocketAddr>, String>);

#[derive(Debug)]
pub(super) struct Resolver {
    /// Each name is asked for once at a time, so this has an end.
    requests: Option<Sender<String>>,
    answers: (Sender<Resolution>, Receiver<Resolution>),
    bell: Arc<WakeFd>,
}

impl Resolver {
    pub(super) fn new(bell: Arc<WakeFd>) -> Self {
        Self { requests: None, answers: unbounded(), bell }
    }

    /// Gives the addresses at once if it is an address, and else later.
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

    /// What was found out.
    pub(super) fn next_answer(&self) -> Option<Resolution> {
        self.answers.1.try_recv().ok()
    }

    fn begin(&self) -> std::io::Result<Sender<String>> {
        let (requests, asked) = unbounded::<String>();
        let (answers, bell) = (self.answers.0.clone(), Arc::clone(&self.bell));
        std::thread::Builder::new().name("fabricast-names".to_owned()).spawn(move || {
            // Ends with those who ask.
            for name in asked {
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

/// Is this like `host:port`?
pub(super) fn check(operation: &'static str, address: &str) -> Result<()> {
    let is_one = address.parse::<SocketAddr>().is_ok_and(|address| address.port() != 0)
        || address.rsplit_once(':').is_some_and(|(host, port)| {
            (1..=253).contains(&host.len())
                && !host.contains(|letter: char| letter.is_whitespace() || letter == ':')
                && port.parse::<u16>().is_ok_and(|port| port != 0)
        });
    if is_one {
        return Ok(());
    }
    let detail = format!("\"{}\" is not like host:port", address.escape_debug());
    Err(Error::new(operation, ErrorKind::InvalidArgument, detail))
}
