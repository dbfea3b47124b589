//! Notifies the service manager, as `sd_notify` does: a datagram to the socket in `NOTIFY_SOCKET`.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The socket of the service manager, if there is one.
#[derive(Debug)]
pub(crate) struct ServiceManager(Option<SocketAddr>);

impl ServiceManager {
    /// The service manager that started this process.
    pub(crate) fn from_environment() -> Self {
        let named = std::env::var("NOTIFY_SOCKET").unwrap_or_default();
        Self::named(&named)
    }

    /// A path, or `@` and the name of an abstract socket.
    fn named(name: &str) -> Self {
        let address = match name.strip_prefix('@') {
            Some(abstract_name) => SocketAddr::from_abstract_name(abstract_name),
            None if name.starts_with('/') => SocketAddr::from_pathname(name),
            None => return Self(None),
        };
        Self(address.ok())
    }

    /// This process serves the node, or is ready to.
    pub(crate) fn notify_ready(&self, status: &str) {
        self.notify(&format!("READY=1\nSTATUS={}", status.replace('\n', " ")));
    }

    pub(crate) fn status(&self, status: &str) {
        self.notify(&format!("STATUS={}", status.replace('\n', " ")));
    }

    pub(crate) fn notify_stopping(&self) {
        self.notify("STOPPING=1");
    }

    fn notify(&self, what: &str) {
        let Some(address) = &self.0 else { return };
        if let Err(error) = send(address, what) {
            tracing::debug!(%error, "notify the service manager failed");
        }
    }
}

fn send(address: &SocketAddr, what: &str) -> io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    // A manager that does not read must not block this process.
    socket.set_nonblocking(true)?;
    socket.send_to_addr(what.as_bytes(), address).map(drop)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn receive(socket: &UnixDatagram) -> String {
        let mut bytes = [0; 200];
        let length = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    }

    #[test]
    fn notifies_a_socket_at_a_path_and_at_an_abstract_name() {
        let name = format!("fabricast-notify-{}", std::process::id());
        let path = std::env::temp_dir().join(&name);
        let at_path = UnixDatagram::bind(&path).unwrap();
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let at_name = UnixDatagram::bind_addr(&address).unwrap();
        for (socket, name) in
            [(&at_path, path.display().to_string()), (&at_name, format!("@{name}"))]
        {
            let manager = ServiceManager::named(&name);
            manager.notify_ready("serves\nall");
            assert_eq!(receive(socket), "READY=1\nSTATUS=serves all");
            manager.notify_stopping();
            assert_eq!(receive(socket), "STOPPING=1");
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn invalid_socket_name_is_ignored() {
        for name in ["", "relative", &format!("/{}", "x".repeat(200))] {
            assert!(ServiceManager::named(name).0.is_none(), "{name}");
        }
    }

    #[test]
    fn absent_or_stopped_manager_delays_nothing() {
        let absent = SocketAddr::from_pathname("/nowhere/at/all").unwrap();
        assert!(send(&absent, "READY=1").is_err());

        let name = format!("fabricast-notify-full-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let unread = UnixDatagram::bind_addr(&address).unwrap();
        let begin = Instant::now();
        // Fill its buffer; a blocking call would never return.
        let full = (0..100_000).find_map(|_| send(&address, "READY=1").err());
        assert_eq!(full.map(|error| error.kind()), Some(io::ErrorKind::WouldBlock));
        ServiceManager::named(&format!("@{name}")).notify_ready("here");
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
        assert_eq!(receive(&unread), "READY=1");
    }
}
