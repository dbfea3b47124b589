//! Telling the service manager how this process is, as `sd_notify` does: a datagram to the
//! socket that it named.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Whom to tell, if anybody asked to be told.
#[derive(Debug)]
pub(crate) struct Manager(Option<SocketAddr>);

impl Manager {
    /// The one that started this process.
    pub(crate) fn of_this_process() -> Self {
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

    /// It serves, or would if nobody else did.
    pub(crate) fn is_ready(&self, status: &str) {
        self.tell(&format!("READY=1\nSTATUS={}", status.replace('\n', " ")));
    }

    /// What it does now.
    pub(crate) fn status(&self, status: &str) {
        self.tell(&format!("STATUS={}", status.replace('\n', " ")));
    }

    /// It is about to end.
    pub(crate) fn is_ending(&self) {
        self.tell("STOPPING=1");
    }

    fn tell(&self, what: &str) {
        let Some(address) = &self.0 else { return };
        if let Err(error) = send(address, what) {
            tracing::debug!(%error, "the service manager does not listen");
        }
    }
}

fn send(address: &SocketAddr, what: &str) -> io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    // A manager that does not read is none that has to be waited for.
    socket.set_nonblocking(true)?;
    socket.send_to_addr(what.as_bytes(), address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hear(socket: &UnixDatagram) -> String {
        let mut bytes = [0; 200];
        let length = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    }

    #[test]
    fn the_manager_hears_at_a_path_and_at_an_abstract_name() {
        let name = format!("fabricast-notify-{}", std::process::id());
        let path = std::env::temp_dir().join(&name);
        let at_path = UnixDatagram::bind(&path).unwrap();
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let at_name = UnixDatagram::bind_addr(&address).unwrap();
        for (socket, name) in
            [(&at_path, path.display().to_string()), (&at_name, format!("@{name}"))]
        {
            let manager = Manager::named(&name);
            manager.is_ready("serves\nall");
            assert_eq!(hear(socket), "READY=1\nSTATUS=serves all");
            manager.is_ending();
            assert_eq!(hear(socket), "STOPPING=1");
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn nobody_need_be_told() {
        for name in ["", "relative", "@", "/nowhere/at/all", &format!("/{}", "x".repeat(200))] {
            Manager::named(name).is_ready("here");
        }
    }
}
