//! Locks of shared memory that a killed process left taken.
//!
//! Up to libfabric 1.18, an endpoint of shm has one lock in its file that its owner takes at each
//! look at the queue, and its peers for each operation. It is a bare spin lock: a process that is
//! killed while it holds one leaves whoever wants it next inside a call that never returns, where
//! no deadline is looked at. A process that polls holds its own lock a good part of the time, so
//! this is no rare accident: of 60 kills of an idle peer it met one in ten.
//!
//! So a thread of ours stays asleep until a peer's process ends, and then looks at the locks that
//! it may have held: the peer's own and those of this process and its other peers. One that is
//! found taken at each of many looks for [`HELD`] is given back. What it protects is a queue whose
//! entries become visible by one store each, so nothing half done is behind it.
//!
//! This knows the first words of a file that libfabric makes. They are believed only if the
//! version in them is the known one.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long a lock must be found taken before its owner counts as dead: many times as long as a
/// living one may be kept from its processor while it holds it.
const HELD: Duration = Duration::from_millis(500);

/// Between two looks at a lock.
const LOOK: Duration = Duration::from_millis(1);

/// How long a peer's file may take to appear before it is looked for less often.
const SOON: Duration = Duration::from_millis(20);
const SELDOM: Duration = Duration::from_secs(1);

/// A file that is not there by then is looked for no more.
const GIVEN_UP: Duration = Duration::from_secs(60);

/// The layout that is known here: of libfabric 1.17 and 1.18.
const VERSION: u8 = 4;
const PROCESS_AT: usize = 4;
const LOCK_AT: usize = 24;
const LENGTH: usize = 4096;

/// Watches the file of an endpoint until the last of those that asked for it drop this. Then the
/// file is closed at once, whatever the thread is doing.
#[derive(Debug)]
pub(crate) struct Watch(Arc<Watched>);

impl Drop for Watch {
    fn drop(&mut self) {
        *self.0.state() = State::Unknown;
        if let Some(Some(guard)) = GUARD.get() {
            guard.ring();
        }
    }
}

/// The file of one endpoint.
#[derive(Debug)]
struct Watched {
    name: String,
    since: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    /// The file is not there yet, or not ready.
    Expected,
    Open(Header),
    /// Nothing that is known here, or nothing to anybody any more.
    Unknown,
}

/// The beginning of a file, mapped.
#[derive(Debug)]
struct Header {
    at: *mut libc::c_void,
    file: File,
    /// Stands for the process that made it, as long as that is not known to have ended.
    process: Option<OwnedFd>,
}

/// What looking for a file gave.
enum Found {
    NotYet,
    /// Nothing that is known here.
    Unknown,
    Living(Header),
    /// Its process has ended, or is one of another namespace.
    Dead(Header),
}

// SAFETY: the mapping belongs to this value alone, and its words are only touched by atomic
// operations.
unsafe impl Send for Header {}

impl Drop for Header {
    fn drop(&mut self) {
        // SAFETY: mapped by `open` with this length, and nobody else has the address.
        unsafe { libc::munmap(self.at, LENGTH) };
    }
}

impl Header {
    fn open(name: &str) -> io::Result<Found> {
        let path = PathBuf::from("/dev/shm").join(name);
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
        let about = file.metadata()?;
        if !about.is_file() {
            return Ok(Found::Unknown);
        }
        if about.len() < LENGTH as u64 {
            return Ok(Found::NotYet);
        }
        // SAFETY: a new mapping of a file that is long enough, taken by `Header`, which ends it.
        let at = unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(ptr::null_mut(), LENGTH, rights, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mut header = Self { at, file, process: None };
        // Written last, when the rest is there.
        let process = header.word(PROCESS_AT);
        if process == 0 {
            return Ok(Found::NotYet);
        }
        if header.word(0).to_ne_bytes()[0] != VERSION || process < 0 {
            return Ok(Found::Unknown);
        }
        if process.unsigned_abs() == std::process::id() {
            return Ok(Found::Living(header));
        }
        // SAFETY: a system call of two numbers; what it gives is a new descriptor.
        let opened = unsafe {
            let fd = libc::syscall(libc::SYS_pidfd_open, process, 0);
            RawFd::try_from(fd).ok().filter(|fd| *fd >= 0).map(|fd| OwnedFd::from_raw_fd(fd))
        };
        let is_gone =
            opened.is_none() && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
        header.process = opened;
        // Where it cannot be watched for another reason, it is not known to be dead.
        Ok(if is_gone { Found::Dead(header) } else { Found::Living(header) })
    }

    fn word(&self, at: usize) -> i32 {
        // SAFETY: inside the mapping and aligned. Others write it meanwhile: read as an atomic.
        let word =
            unsafe { std::sync::atomic::AtomicI32::from_ptr(self.at.byte_add(at).cast::<i32>()) };
        word.load(std::sync::atomic::Ordering::Acquire)
    }

    fn lock(&self) -> *mut libc::pthread_spinlock_t {
        // SAFETY: inside the mapping.
        unsafe { self.at.byte_add(LOCK_AT).cast() }
    }

    fn is_taken(&self) -> bool {
        // SAFETY: an initialised lock, shared between processes, in a mapping that `self` keeps.
        unsafe {
            if libc::pthread_spin_trylock(self.lock()) != 0 {
                return true;
            }
            libc::pthread_spin_unlock(self.lock());
        }
        false
    }

    /// Does the process that made the file live and stand still? Then the lock may be its.
    fn is_stopped(&self) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/stat", self.word(PROCESS_AT)));
        // The state stands behind the name, which may have anything in it.
        let state = status.ok().and_then(|text| text.rsplit_once(") ")?.1.chars().next());
        self.process.is_some() && matches!(state, Some('T' | 't' | 'D'))
    }

    /// Is the lock taken at each look until the time is over? Then it is given back.
    fn give_back(&self) -> bool {
        // Of several that saw the same process die one does it, else the second would give
        // back what somebody took after the first.
        let file = self.file.as_raw_fd();
        let (mut is_alone, end) = (false, Instant::now() + 4 * HELD);
        let mut taken_since = Instant::now();
        loop {
            if !self.is_taken() {
                break;
            }
            if !is_alone {
                // SAFETY: a system call on a descriptor that `self` keeps open.
                is_alone = unsafe { libc::flock(file, libc::LOCK_EX | libc::LOCK_NB) } == 0;
                taken_since = Instant::now();
            }
            if is_alone && taken_since.elapsed() >= HELD && !self.is_stopped() {
                // SAFETY: as above. Nobody that lives holds it: see `HELD`.
                unsafe { libc::pthread_spin_unlock(self.lock()) };
                return self.end(is_alone, true);
            }
            if Instant::now() >= end {
                break;
            }
            std::thread::sleep(LOOK);
        }
        self.end(is_alone, false)
    }

    fn end(&self, is_alone: bool, gave_back: bool) -> bool {
        if is_alone {
            // SAFETY: as above.
            unsafe { libc::flock(self.file.as_raw_fd(), libc::LOCK_UN) };
        }
        gave_back
    }
}

/// All that is watched in this process, and the thread that does it.
struct Guard {
    watched: Mutex<HashMap<String, Weak<Watch>>>,
    /// Wakes the thread.
    bell: OwnedFd,
}

static GUARD: OnceLock<Option<Guard>> = OnceLock::new();

/// Watches the file of an endpoint of shm, given by its address. `None` where there is nothing to
/// watch or no means to do it; then all is as libfabric has it.
pub(crate) fn watch(address: &[u8]) -> Option<Arc<Watch>> {
    let text = std::ffi::CStr::from_bytes_until_nul(address).ok()?.to_str().ok()?;
    let name = text.split_once("://").map_or(text, |(_, name)| name);
    // The address is a peer's word.
    if name.is_empty() || name.contains('/') || name == "." || name == ".." {
        return None;
    }
    let guard = GUARD.get_or_init(Guard::start).as_ref()?;
    let mut watched = guard.watched.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = watched.get(name).and_then(Weak::upgrade) {
        return Some(known);
    }
    let state = Mutex::new(State::Expected);
    let new = Watched { name: name.to_owned(), since: Instant::now(), state };
    let new = Arc::new(Watch(Arc::new(new)));
    watched.insert(name.to_owned(), Arc::downgrade(&new));
    drop(watched);
    guard.ring();
    Some(new)
}

impl Watched {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the file if it is there by now. Is it there, and its process is not?
    fn open(&self) -> bool {
        let mut state = self.state();
        if !matches!(*state, State::Expected) {
            return false;
        }
        let (new, is_dead) = match Header::open(&self.name) {
            Ok(Found::Living(header)) => (State::Open(header), false),
            Ok(Found::Dead(header)) => (State::Open(header), true),
            Ok(Found::NotYet) | Err(_) if self.since.elapsed() < GIVEN_UP => return false,
            Ok(_) | Err(_) => (State::Unknown, false),
        };
        *state = new;
        is_dead
    }

    fn is_expected(&self) -> bool {
        matches!(*self.state(), State::Expected)
    }

    fn is_taken(&self) -> bool {
        matches!(&*self.state(), State::Open(header) if header.is_taken())
    }

    /// The descriptor of the process that made it, if that was seen alive.
    fn process(&self) -> Option<RawFd> {
        match &*self.state() {
            State::Open(header) => header.process.as_ref().map(AsRawFd::as_raw_fd),
            State::Expected | State::Unknown => None,
        }
    }

    /// Its process has ended, and did not remove the file if that is still there. A name that is
    /// nobody's but its own (`Info::name_uniquely`) is not used again, so the file may go.
    /// False if nobody watches it any more.
    fn is_left(&self) -> bool {
        let State::Open(header) = &mut *self.state() else { return false };
        header.process = None;
        if self.name.starts_with(&format!("{}-", header.word(PROCESS_AT))) {
            let _ = std::fs::remove_file(PathBuf::from("/dev/shm").join(&self.name));
        }
        true
    }

    fn give_back(&self) {
        let State::Open(header) = &*self.state() else { return };
        if header.give_back() {
            tracing::warn!(
                file = self.name,
                "a process was killed while it held the lock of an shm endpoint; it was given back"
            );
        }
    }
}

impl Guard {
    fn start() -> Option<Self> {
        // SAFETY: a system call of two numbers; what it gives is a new descriptor.
        let bell = unsafe {
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
            (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))
        }?;
        let thread = std::thread::Builder::new().name("fabric-shm".to_owned());
        // It lives as long as the process: it sleeps, and holds nothing.
        thread.spawn(run).ok()?;
        Some(Self { watched: Mutex::default(), bell })
    }

    fn ring(&self) {
        let one = 1_u64.to_ne_bytes();
        // SAFETY: eight bytes of ours to a descriptor of ours.
        unsafe { libc::write(self.bell.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    fn all(&self) -> Vec<Arc<Watched>> {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.retain(|_, entry| entry.strong_count() > 0);
        watched.values().filter_map(|watch| Some(Arc::clone(&watch.upgrade()?.0))).collect()
    }
}

fn run() {
    // Not before `start` is done.
    let guard = loop {
        match GUARD.get() {
            Some(Some(guard)) => break guard,
            Some(None) => return,
            None => std::thread::sleep(LOOK),
        }
    };
    loop {
        let all = guard.all();
        let mut has_died = false;
        for one in &all {
            has_died |= one.open();
        }
        let ages = all.iter().filter(|one| one.is_expected()).map(|one| one.since.elapsed());
        // The youngest's age: looked for often at first, then seldom.
        let wait = ages.min().map_or(-1, |age| age.clamp(SOON, SELDOM).as_millis() as i32);
        let mut ends: Vec<libc::pollfd> = Vec::with_capacity(1 + all.len());
        let wanted = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        ends.push(wanted(guard.bell.as_raw_fd()));
        // A negative descriptor is passed over. One that is closed meanwhile says something, or
        // another one that has its number does: nobody watches it then.
        ends.extend(all.iter().map(|one| wanted(one.process().unwrap_or(-1))));
        let wait = if has_died { 0 } else { wait };
        // SAFETY: as many entries as are said, which outlive the call.
        unsafe { libc::poll(ends.as_mut_ptr(), ends.len() as libc::nfds_t, wait) };
        if ends[0].revents != 0 {
            let mut count = [0; 8];
            // SAFETY: eight bytes of ours from a descriptor of ours.
            unsafe { libc::read(guard.bell.as_raw_fd(), count.as_mut_ptr().cast(), 8) };
        }
        for (one, _) in all.iter().zip(&ends[1..]).filter(|(_, end)| end.revents != 0) {
            has_died |= one.is_left();
        }
        if !has_died {
            continue;
        }
        // Any of them may be what it held. At the same time, since each takes its time.
        std::thread::scope(|scope| {
            for one in all.iter().filter(|one| one.is_taken()) {
                scope.spawn(|| one.give_back());
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    /// A file as libfabric makes it, of a process that sleeps, whose lock is taken.
    struct Fake {
        path: PathBuf,
        child: Child,
        header: Header,
        _alone: std::sync::MutexGuard<'static, ()>,
    }

    /// Where tests share a process: the death of one test's child is a reason to look at the locks
    /// of all.
    static ALONE: Mutex<()> = Mutex::new(());

    impl Fake {
        fn new(test: &str, version: u8) -> Self {
            let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
            let name = format!("fabric-dead-locks-{test}-{}", std::process::id());
            let path = PathBuf::from("/dev/shm").join(&name);
            let child = Command::new("sleep").arg("100").spawn().unwrap();
            let mut bytes = vec![0; LENGTH];
            bytes[0] = VERSION;
            bytes[PROCESS_AT..][..4].copy_from_slice(&child.id().to_ne_bytes());
            std::fs::write(&path, &bytes).unwrap();
            let Ok(Found::Living(header)) = Header::open(&name) else { panic!("{name}") };
            // SAFETY: nobody else uses it yet.
            unsafe {
                libc::pthread_spin_init(header.lock(), libc::PTHREAD_PROCESS_SHARED);
                assert_eq!(libc::pthread_spin_trylock(header.lock()), 0);
            }
            std::os::unix::fs::FileExt::write_all_at(&header.file, &[version], 0).unwrap();
            Self { path, child, header, _alone: alone }
        }

        fn address(&self) -> Vec<u8> {
            format!("fi_shm://{}\0", self.path.file_name().unwrap().display()).into_bytes()
        }

        fn kill(&mut self) {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
        }

        fn is_free_within(&self, time: Duration) -> bool {
            let end = Instant::now() + time;
            while Instant::now() < end {
                if !self.header.is_taken() {
                    return true;
                }
                std::thread::sleep(LOOK);
            }
            false
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
            let _ = std::fs::remove_file(&self.path);
        }
    }

    #[test]
    fn the_lock_of_the_dead_is_given_back_and_that_of_the_living_is_not() {
        let mut fake = Fake::new("killed", VERSION);
        let _watched = watch(&fake.address()).unwrap();
        assert!(!fake.is_free_within(2 * HELD), "its owner lives");
        fake.kill();
        assert!(fake.is_free_within(10 * HELD), "its owner is dead");
    }

    #[test]
    fn it_is_given_back_when_its_owner_was_dead_before() {
        let mut fake = Fake::new("dead", VERSION);
        fake.kill();
        let _watched = watch(&fake.address()).unwrap();
        assert!(fake.is_free_within(10 * HELD));
    }

    #[test]
    fn a_layout_that_is_not_known_is_not_touched() {
        let mut fake = Fake::new("unknown", VERSION + 1);
        let _watched = watch(&fake.address()).unwrap();
        fake.kill();
        assert!(!fake.is_free_within(3 * HELD));
    }

    #[test]
    fn what_is_not_watched_any_more_is_closed_at_once() {
        let fake = Fake::new("closed", VERSION);
        let is_open = || {
            let entries = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
            let targets = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
            targets.filter(|target| *target == fake.path).count()
        };
        let own = is_open();
        for _ in 0..20 {
            let watched = watch(&fake.address()).unwrap();
            let end = Instant::now() + SELDOM;
            while is_open() == own && Instant::now() < end {
                std::thread::sleep(LOOK);
            }
            assert_eq!(is_open(), own + 1);
            drop(watched);
            assert_eq!(is_open(), own);
        }
    }

    #[test]
    fn what_is_not_watched_any_more_is_not_touched() {
        let mut fake = Fake::new("dropped", VERSION);
        drop(watch(&fake.address()).unwrap());
        fake.kill();
        assert!(!fake.is_free_within(3 * HELD));
    }

    #[test]
    fn a_file_that_appears_later_is_found() {
        let mut fake = Fake::new("later", VERSION);
        let aside = fake.path.with_extension("aside");
        std::fs::rename(&fake.path, &aside).unwrap();
        let _watched = watch(&fake.address()).unwrap();
        std::thread::sleep(3 * SOON);
        std::fs::rename(&aside, &fake.path).unwrap();
        fake.kill();
        assert!(fake.is_free_within(SELDOM + 10 * HELD));
    }

    #[test]
    fn the_file_of_the_dead_goes_if_its_name_is_its_own() {
        let mut fake = Fake::new("unique", VERSION);
        let named = fake.path.with_file_name(format!("{}-test", fake.child.id()));
        std::fs::rename(&fake.path, &named).unwrap();
        fake.path = named;
        let _watched = watch(&fake.address()).unwrap();
        std::thread::sleep(3 * SOON);
        assert!(fake.path.exists());
        fake.kill();
        assert!(fake.is_free_within(10 * HELD));
        assert!(!fake.path.exists());
    }

    #[test]
    fn an_address_may_name_files_of_that_folder_only() {
        for address in ["fi_shm://../../etc/passwd\0", "fi_shm://\0", "..\0", "no end", "a/b\0"] {
            assert!(watch(address.as_bytes()).is_none(), "{address}");
        }
    }
}
