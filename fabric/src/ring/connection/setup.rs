//! Options of a ring between two programs; listening and connecting.

use std::fmt::Display;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::time::Duration;

use super::super::geometry::RingGeometry;
use super::{OPERATION, RingKey, RingListener, RingSetup, RingWriter, connector, provider_choice};
use crate::{Error, ErrorKind, Policy, Result};

const LISTEN: &str = "listen for writer of ring";
/// Why a ring beyond this machine needs consent.
const INSECURE: &str = "rings are not authenticated or encrypted yet: any program that can connect \
    can write messages";

/// Listens for writers of rings at an address, as `host:port`, with default options. This program
/// reads each ring; the program that connects writes it.
///
/// Addresses beyond loopback need consent: [`RingSetup::insecure`].
///
/// ```
/// use std::time::Duration;
/// use fabric::{ErrorKind, ring};
///
/// let timeout = Duration::from_secs(10);
/// let mut listener = ring::listen("127.0.0.1:0")?;
/// let address = listener.address();
/// // Usually another process or machine.
/// let writing = std::thread::spawn(move || {
///     let mut writer = ring::connect(address, timeout)?;
///     writer.send(b"hello", timeout)?;
///     writer.close(timeout)
/// });
/// let mut reader = listener.accept(timeout)?;
/// assert_eq!(reader.receive(timeout)?, b"hello");
/// // The writer closed the ring, and everything was read.
/// assert_eq!(reader.receive(timeout).unwrap_err().kind(), ErrorKind::Closed);
/// writing.join().expect("the writer panicked")?;
/// # Ok::<(), fabric::Error>(())
/// ```
///
/// # Errors
/// As [`RingSetup::listen`].
pub fn listen(address: impl ToSocketAddrs + Display) -> Result<RingListener> {
    RingSetup::new().listen(address)
}

/// Connects to a program that [listens](listen) at an address, as `host:port`, with default
/// options. This program writes the ring. Tries again until the deadline while nothing listens
/// there.
///
/// # Errors
/// As [`RingSetup::connect`].
pub fn connect(address: impl ToSocketAddrs + Display, timeout: Duration) -> Result<RingWriter> {
    RingSetup::new().connect(address, timeout)
}

impl Default for RingSetup {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            capacity: 8 << 20,
            largest: 1 << 30,
            insecure: false,
            key: None,
        }
    }
}

impl RingSetup {
    /// A ring of 8 MiB for messages of up to 1 GiB, by the best common provider that reaches other
    /// machines, on loopback addresses only.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The providers that may be used, of those that both sides have; the reader's preference
    /// decides. A provider that stays on the machine (shm) is used only if it is required.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// The providers that may be used if [`policy`](Self::policy) was not called.
    #[must_use]
    pub fn default_policy(self, policy: &Policy) -> Self {
        if self.policy == Policy::default() { self.policy(policy.clone()) } else { self }
    }

    /// Bytes of the ring, in the reader's memory. The writer ignores it.
    #[must_use]
    pub fn capacity(mut self, bytes: u64) -> Self {
        self.capacity = bytes;
        self
    }

    /// The longest message that the reader accepts, in bytes, independent of the ring's capacity.
    /// The writer ignores it and refuses longer messages.
    #[must_use]
    pub fn largest(mut self, bytes: u64) -> Self {
        self.largest = bytes;
        self
    }

    /// Allows addresses beyond loopback, although peers are not authenticated and nothing is
    /// encrypted yet. On loopback, any user of the machine can connect.
    #[must_use]
    pub fn insecure(mut self) -> Self {
        self.insecure = true;
        self
    }

    /// A key that the program exchanged before: the reader refuses writers that have another one or
    /// none. It travels unencrypted, so it only separates programs that cannot see the traffic.
    ///
    /// ```
    /// use std::time::Duration;
    /// use fabric::{ErrorKind, ring::RingSetup};
    /// let second = Duration::from_secs(1);
    /// let mut listener = RingSetup::new().key([7; 16]).listen("127.0.0.1:0")?;
    /// let address = listener.address();
    /// let reading = std::thread::spawn(move || listener.accept(second).map(drop));
    /// let refused = RingSetup::new().key([8; 16]).connect(address, second).unwrap_err();
    /// assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    /// assert!(reading.join().expect("the reader panicked").is_err());
    /// # Ok::<(), fabric::Error>(())
    /// ```
    #[must_use]
    pub fn key(mut self, key: [u8; 16]) -> Self {
        self.key = Some(RingKey(key));
        self
    }

    /// Listens at an address, as `host:port`; with port 0 the system picks a port, which
    /// [`address`](RingListener::address) returns.
    ///
    /// # Errors
    /// `InvalidArgument` for an invalid address, one beyond loopback without
    /// [consent](Self::insecure), or an impossible capacity; `NoProvider` if no local provider may
    /// be used; errors of the system.
    pub fn listen(&self, address: impl ToSocketAddrs + Display) -> Result<RingListener> {
        if RingGeometry::new(self.capacity, 0).is_none() {
            let detail = format!(
                "a ring of {} bytes is impossible. Use 1 KiB to 1 TiB, and a multiple of two granules",
                self.capacity
            );
            return Err(Error::new(ErrorKind::InvalidArgument, LISTEN, detail));
        }
        let addresses = self.addresses(LISTEN, &address)?;
        let failed = |error: std::io::Error| Error::from_io_error(LISTEN, &address, &error);
        let listener = TcpListener::bind(&addresses[..]).map_err(failed)?;
        let local = listener.local_addr().map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        // Fails now rather than at the first writer.
        provider_choice::usable_providers(provider_choice::bind_address(local), &self.policy)?;
        self.warn_if_insecure(local);
        Ok(RingListener::new(self.clone(), listener, local))
    }

    /// Connects to a program that listens at an address, as `host:port`, and establishes a ring.
    /// Tries again until the deadline while nothing listens there. The time to resolve a name is
    /// not bounded by the deadline.
    ///
    /// # Errors
    /// `InvalidArgument` for an invalid address, or one beyond loopback without
    /// [consent](Self::insecure); `ConnectionRefused` if nothing listens there, or the reader
    /// refuses; `NoProvider` without a common provider; `VersionMismatch`; `MalformedDescriptor` if
    /// another kind of program listens there; `DeadlineExceeded`.
    pub fn connect(
        &self,
        address: impl ToSocketAddrs + Display,
        timeout: Duration,
    ) -> Result<RingWriter> {
        let addresses = self.addresses(OPERATION, &address)?;
        self.warn_if_insecure(addresses[0]);
        connector::connect(self, &addresses, &address.to_string(), timeout)
    }

    /// Resolves an address and checks that it may be used: at least one.
    fn addresses(
        &self,
        operation: &'static str,
        address: &(impl ToSocketAddrs + Display),
    ) -> Result<Vec<SocketAddr>> {
        let refuse = |why: String| {
            let detail = format!("\"{}\": {why}", address.to_string().escape_debug());
            Err(Error::new(ErrorKind::InvalidArgument, operation, detail))
        };
        let addresses: Vec<_> = match address.to_socket_addrs() {
            Ok(addresses) => addresses.collect(),
            Err(error) => return refuse(format!("{error}. Use the form host:port")),
        };
        if addresses.is_empty() {
            return refuse("the name resolves to no address".to_owned());
        }
        if !self.insecure && addresses.iter().any(leaves_loopback) {
            return refuse(format!("{INSECURE}. To allow this: RingSetup::insecure"));
        }
        Ok(addresses)
    }

    fn warn_if_insecure(&self, address: SocketAddr) {
        if leaves_loopback(&address) {
            tracing::warn!(%address, "insecure: {INSECURE}");
        }
    }
}

fn leaves_loopback(address: &SocketAddr) -> bool {
    !address.ip().to_canonical().is_loopback()
}
