//! Sharing between processes that know nothing but a token: bytes that are sent by any means.

use std::cell::Cell;
use std::collections::HashMap;
use std::fs::DirBuilder;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpu::Device;
use ipc::{ChannelListener, Credentials, DirectoryLock, ForkGeneration, PerProcess};
use threads::lock;

use super::client::Wait;
use super::names::{self, SharedName};
use super::token::{SOCKET_PREFIX, digits, read, socket_in, token_of};
use super::{Published, ShareClient, ShareService};
use crate::admission::Admission;
use crate::error::{Error, ErrorKind, Result, failed};
use crate::share::{OpenedBuffer, SharedBuffer, check_fork, random};

const OPEN: &str = "open shared memory";
const SHARE: &str = "share memory";
/// Above this number of clients, unused ones are dropped.
const MAX_CLIENTS: usize = 64;

/// The default directory: `$FABRICAST_DIRECTORY`, or else a directory of this user in
/// `$XDG_RUNTIME_DIR`, if that exists, `$TMPDIR` or `/tmp`.
///
/// Batch systems pass `$XDG_RUNTIME_DIR` on to machines that do not have it.
#[must_use]
pub fn default_directory() -> PathBuf {
    let named = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(directory) = named("FABRICAST_DIRECTORY") {
        return directory.into();
    }
    match named("XDG_RUNTIME_DIR").filter(|directory| Path::new(directory).is_dir()) {
        Some(directory) => PathBuf::from(directory).join("fabricast"),
        None => {
            let user = Credentials::of_this_process().user;
            std::env::temp_dir().join(format!("fabricast-{user}"))
        }
    }
}

/// Objects of this process, by their keys.
type Registered<K, V> = PerProcess<Mutex<HashMap<K, Arc<V>>>>;

/// The services of this process, by their directories and users.
static SERVICES: Registered<(PathBuf, Admission), Service> = PerProcess::new();
/// The clients of this process, by the sockets of their services, and the users that they trust.
static CLIENTS: Registered<(PathBuf, Vec<u32>), ShareClient> = PerProcess::new();

/// A service, and the identity of its socket.
#[derive(Debug)]
struct Service {
    service: ShareService,
    socket: [u8; 16],
}

/// Memory that this process shares: other processes open it by its token, as long as this exists.
#[derive(Debug)]
pub struct Share {
    token: Vec<u8>,
    name: [u8; 16],
    is_left_to_receiver: bool,
    service: Arc<Service>,
    fork_generation: ForkGeneration,
}

/// Shares memory by a token, which may be sent by any means: processes of this user on this machine
/// [open](open) it, in containers that see the directory, too.
///
/// One thread of this process serves all that it shares, at a socket in the directory, which is
/// created for this user if it does not exist.
///
/// ```
/// # let directory = std::env::temp_dir().join(format!("fabricast-token-{}", std::process::id()));
/// use std::time::Duration;
/// use transfer::{ElementType, HostBuffer, SharedBuffer, Tensor};
/// let memory = HostBuffer::new(1 << 20)?;
/// let tensor = Tensor::contiguous(ElementType::F32, &[512, 512]);
/// let share = transfer::share(&directory, SharedBuffer::new(&memory, &tensor)?)?;
/// // In another process:
/// let opened = transfer::open(share.token(), &directory, None, Duration::from_secs(10))?;
/// assert_eq!(opened.tensor(), &tensor);
/// # drop((share, opened));
/// # std::fs::remove_dir_all(&directory)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Failed`](ErrorKind::Failed) if no socket can be created in the directory.
pub fn share(directory: &Path, shared: SharedBuffer) -> Result<Share> {
    share_with(directory, shared, &Admission::own_user())
}

/// Shares memory by a token, as [`share`], with these users and groups. The directory must let them
/// through; it is created for this user if it does not exist.
///
/// # Errors
/// Those of [`share`].
pub fn share_with(directory: &Path, shared: SharedBuffer, admission: &Admission) -> Result<Share> {
    let mut before = None;
    let service = {
        let key = (directory.to_owned(), admission.clone());
        let mut services = lock(SERVICES.get());
        match services.get(&key) {
            // Without its socket the directory was removed.
            Some(service) if service.service.path().exists() => Arc::clone(service),
            _ => {
                let service = Arc::new(start(directory, admission)?);
                before = services.insert(key, Arc::clone(&service));
                service
            }
        }
    };
    // Without the lock: its thread ends, if nothing is shared there.
    drop(before);
    let (name, socket) = (random(SHARE)?, service.socket);
    let own = service.service.path().parent().unwrap_or(directory).as_os_str().as_bytes();
    let token = token_of(socket, name, own).ok_or("the path is too long").map_err(failed(SHARE))?;
    let published = Published::new(shared);
    service.service.add(&digits(name), published)?;
    let fork_generation = ForkGeneration::current();
    Ok(Share { token, name, is_left_to_receiver: false, service, fork_generation })
}

/// Starts a service of this process in a directory, and removes the sockets and names of killed ones.
fn start(directory: &Path, admission: &Admission) -> Result<Service> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(failed(SHARE)(error).at(directory));
        }
        _ => {}
    }
    // A directory that cannot be read, or is locked for long, is left as it is.
    if let (Ok(_alone), Ok(entries)) = (DirectoryLock::take(directory), directory.read_dir()) {
        for entry in entries.flatten() {
            let is_share = entry.file_name().as_bytes().starts_with(SOCKET_PREFIX.as_bytes());
            if is_share && ChannelListener::is_stale(&entry.path()) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
        names::remove_stale(directory);
    }
    // Its path is also valid after a change of the working directory.
    let directory =
        std::path::absolute(directory).map_err(|error| failed(SHARE)(error).at(directory))?;
    let socket = random(SHARE)?;
    let service = ShareService::start(&socket_in(&directory, socket), admission.clone())?;
    Ok(Service { service, socket })
}

impl Share {
    /// By which other processes [open](open) it: a secret of about 100 bytes.
    #[must_use]
    pub fn token(&self) -> &[u8] {
        &self.token
    }

    /// A token of [`SHORT_TOKEN_LENGTH`](super::SHORT_TOKEN_LENGTH) bytes, for places that have no
    /// more: without the directory, so that its receivers look for the socket in their own directory
    /// only.
    #[must_use]
    pub fn short_token(&self) -> Vec<u8> {
        // Far below the maximum of a descriptor.
        token_of(self.service.socket, self.name, b"").unwrap_or_default()
    }

    /// Gives the memory a name, under which other processes [find](super::shared_under_name) its token,
    /// as long as the returned object and this process exist.
    ///
    /// ```
    /// # let directory = std::env::temp_dir().join(format!("fabricast-name-{}", std::process::id()));
    /// use transfer::{ElementType, HostBuffer, SharedBuffer, Tensor};
    /// let memory = HostBuffer::new(4096)?;
    /// let tensor = Tensor::contiguous(ElementType::U8, &[4096]);
    /// let share = transfer::share(&directory, SharedBuffer::new(&memory, &tensor)?)?;
    /// let name = share.publish_name("weights")?;
    /// // In another process:
    /// let token = transfer::shared_under_name(&directory, "weights")?.expect("it is shared");
    /// assert_eq!(token, share.token());
    /// drop(name);
    /// assert_eq!(transfer::shared_under_name(&directory, "weights")?, None);
    /// # drop(share);
    /// # std::fs::remove_dir_all(&directory)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`TooMany`](ErrorKind::TooMany) if a process that lives shares memory under this name;
    /// [`Malformed`](ErrorKind::Malformed) for a name of more than
    /// [`MAX_SHARED_NAME_LENGTH`](super::MAX_SHARED_NAME_LENGTH) bytes, or with slashes or control
    /// characters; [`Failed`](ErrorKind::Failed); [`Forked`](ErrorKind::Forked).
    pub fn publish_name(&self, name: &str) -> Result<SharedName> {
        check_fork(self.fork_generation, SHARE)?;
        let state = &self.service.service.state;
        let is_secret = state.admission == Admission::own_user();
        // A socket is in a directory.
        let directory = self.service.service.path().parent().unwrap_or(Path::new("/"));
        SharedName::publish(directory, name, &self.token, is_secret)
    }

    /// Limits the memory to one receiver: it can be opened once.
    ///
    /// # Errors
    /// [`Forked`](ErrorKind::Forked).
    pub fn limit_to_one(&self) -> Result<()> {
        check_fork(self.fork_generation, SHARE)?;
        let mut shared = lock(&self.service.service.state.shared);
        if let Some(published) = shared.get_mut(&digits(self.name)) {
            published.is_for_one = true;
        }
        Ok(())
    }

    /// Leaves the memory to its receivers: it stays shared when this is gone, until it was opened if
    /// it is [limited](Self::limit_to_one), or until this process ends.
    pub fn leave(mut self) {
        self.is_left_to_receiver = true;
        if self.fork_generation.is_current()
            && let Some(published) =
                lock(&self.service.service.state.shared).get_mut(&digits(self.name))
        {
            published.is_left = true;
        }
    }

    /// Leaves the memory to one receiver: it is shared until it was opened once, or this process
    /// ends.
    ///
    /// # Errors
    /// As for [`limit_to_one`](Self::limit_to_one).
    pub fn for_one_receiver(self) -> Result<Vec<u8>> {
        self.limit_to_one()?;
        let token = self.token.clone();
        self.leave();
        Ok(token)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if !self.is_left_to_receiver && self.fork_generation.is_current() {
            // Processes that opened it keep it.
            let _ = self.service.service.withdraw(&digits(self.name));
        }
    }
}

/// Maps memory of another process by its token, for its own device or for another one too. The other
/// process keeps the memory until the returned buffer and its clones are gone.
///
/// Memory that this process has opened by the token and still uses is returned at once, without the
/// other process, even if that does not share it any more.
///
/// `directory` is that of this process: the socket of the other one is looked for there if its own
/// path does not exist here, as in another container.
///
/// # Errors
/// [`Closed`](ErrorKind::Closed) if the other process has ended;
/// [`Unknown`](ErrorKind::Unknown) if it does not share the memory any more;
/// [`Malformed`](ErrorKind::Malformed) for other bytes; as for [`ShareClient::open`].
pub fn open(
    token: &[u8],
    directory: &Path,
    device: Option<&Device>,
    timeout: Duration,
) -> Result<OpenedBuffer> {
    open_of(token, directory, &[], device, timeout, &|| true)
}

/// Maps memory by its token, as [`open`], which a process of one of these users may share, too, beside
/// the own user and root. While it waits, it asks `goes_on` every 50 ms: false ends the call. Memory for
/// one receiver can be opened again then.
///
/// # Errors
/// Those of [`open`]; [`Denied`](ErrorKind::Denied) if another user shares it, or does not admit this
/// one; [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) if the caller ended it.
pub fn open_of(
    token: &[u8],
    directory: &Path,
    users: &[u32],
    device: Option<&Device>,
    timeout: Duration,
    goes_on: &dyn Fn() -> bool,
) -> Result<OpenedBuffer> {
    // Asked no more, once it has said no: it may take note of a signal.
    let has_ended = Cell::new(false);
    let goes_on = || {
        has_ended.set(has_ended.get() || !goes_on());
        !has_ended.get()
    };
    let wait = Wait::new(timeout, &goes_on);
    let (name, path) = read(token, directory)?;
    let key = (path.clone(), users.to_vec());
    let client = {
        let mut clients = lock(CLIENTS.get());
        if clients.len() >= MAX_CLIENTS {
            clients.retain(|_, client| Arc::strong_count(client) > 1 || client.is_in_use());
        }
        let new = || Arc::new(ShareClient::new(&path, users));
        Arc::clone(clients.entry(key.clone()).or_insert_with(new))
    };
    if let Some(opened) = client.opened(&name, device) {
        return Ok(opened);
    }
    client.open_while(&name, device, wait).map_err(|error| match error.kind() {
        ErrorKind::Closed => {
            // What is open here can be opened again.
            if !client.is_in_use() {
                lock(CLIENTS.get()).remove(&key);
            }
            let detail = "the process that shared it has ended, or its directory is not visible here. \
                          Keep that process until the memory was opened";
            Error::new(OPEN, ErrorKind::Closed, detail).at(&path)
        }
        ErrorKind::Unknown => {
            let detail = "its owner does not share it any more, or it was for one receiver, which has \
                          opened it. Keep it shared until all have opened it";
            Error::new(OPEN, ErrorKind::Unknown, detail).at(&path)
        }
        _ => error,
    })
}

/// Waits until what this process left to one receiver each was opened: host memory stays with the
/// receiver then, although this process ends. False if some was not opened in time, or the caller ended
/// the wait: `goes_on` is asked every 50 ms.
///
/// ```
/// use std::time::Duration;
/// // Nothing was left.
/// assert!(transfer::wait_for_receivers(Duration::from_secs(10), &|| true));
/// ```
pub fn wait_for_receivers(timeout: Duration, goes_on: &dyn Fn() -> bool) -> bool {
    /// Between two looks, and between two questions to the caller.
    const PAUSE: Duration = Duration::from_millis(2);
    const QUESTION: Duration = Duration::from_millis(50);
    let end = ipc::deadline(timeout);
    let mut next_question = Instant::now() + QUESTION;
    while lock(SERVICES.get()).values().any(|service| service.service.has_left()) {
        let now = Instant::now();
        if now >= end || (now >= next_question && !goes_on()) {
            return false;
        }
        if now >= next_question {
            next_question = now + QUESTION;
        }
        std::thread::sleep(PAUSE);
    }
    true
}
