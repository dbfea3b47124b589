//! Destinations of the messages.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, Flock, FlockArg, RenameFlags, renameat2};
use nix::libc;
use nix::poll::PollFlags;
use nix::unistd::linkat;

use crate::cli::exit::{Exit, Failure, Result};
use crate::cli::signals::{SLICE, Signals, interrupted};
use crate::cli::text;

/// A writable pipe takes at least so many bytes without blocking (PIPE_BUF).
const PIPE_WRITE_SIZE: usize = 4096;
const SIGNAL_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum digits of a file name.
const DIGITS: usize = 8;
const PART_SUFFIX: &str = ".part";
/// Attempts to create a partial file; another process may remove it before it is locked.
const ATTEMPTS: usize = 8;

#[derive(Debug)]
pub(super) enum Sink {
    /// Messages are not written.
    Discard,
    /// Standard output, in writes of at most this size.
    Output { write_size: usize, is_terminal: bool },
    /// Appended to a file.
    File(PathBuf, File),
    /// Each message to its own numbered file.
    Directory { path: PathBuf, number: u64, is_unnamed: bool, part: Option<PartialFile> },
}

/// File of a message that is not complete yet. It has no name (`O_TMPFILE`), so that nothing is
/// left if its process is killed. Where that is not supported, it has one, and is removed if the
/// message stays incomplete. After a kill, the next process that writes in the directory removes
/// it: a running process holds its lock.
#[derive(Debug)]
pub(super) struct PartialFile {
    file: PartialFileHandle,
    name: Option<PathBuf>,
}

#[derive(Debug)]
enum PartialFileHandle {
    Locked(Flock<File>),
    /// Unlocked: no other process can find an unnamed file, and where locks are unsupported none is
    /// removed as stale.
    Unlocked(File),
}

impl std::ops::Deref for PartialFileHandle {
    type Target = File;

    fn deref(&self) -> &File {
        match self {
            Self::Locked(file) => file,
            Self::Unlocked(file) => file,
        }
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            let _ = std::fs::remove_file(name);
        }
    }
}

impl PartialFile {
    fn unnamed(directory: &Path) -> Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.write(true).custom_flags(libc::O_TMPFILE).open(directory);
        let file = PartialFileHandle::Unlocked(file.map_err(|error| failed(directory, &error))?);
        Ok(Self { file, name: None })
    }

    /// Are unnamed files supported that can get a name later? Tried with a name that is removed at
    /// once.
    fn supports_unnamed(directory: &Path, target: &Path) -> Result<bool> {
        let Ok(mut part) = Self::unnamed(directory) else { return Ok(false) };
        let name = part_name(target)?;
        let is_named = part.link_as(&name).is_ok_and(|is_free| is_free);
        part.name = is_named.then_some(name);
        Ok(is_named)
    }

    /// Creates it with a random name.
    fn named(target: &Path) -> Result<Self> {
        Self::create_named_with(target, lock)
    }

    /// Creates it with a function that locks it.
    fn create_named_with(
        target: &Path,
        lock: impl Fn(File) -> Result<Flock<File>, (File, Errno)>,
    ) -> Result<Self> {
        for _ in 0..ATTEMPTS {
            let path = part_name(target)?;
            let file = OpenOptions::new().write(true).create_new(true).open(&path);
            let file = file.map_err(|error| failed(&path, &error))?;
            let (file, error) = match lock(file) {
                Ok(file) => (PartialFileHandle::Locked(file), None),
                Err((file, error)) => (PartialFileHandle::Unlocked(file), Some(error)),
            };
            // Removed on drop unless it is linked.
            let part = Self { file, name: Some(path) };
            match error {
                None | Some(Errno::EOPNOTSUPP | Errno::ENOSYS) => {}
                Some(Errno::EWOULDBLOCK | Errno::EINTR) => continue,
                // Other processes could lock it, and would remove it as stale.
                Some(error) => {
                    let why = format!("it cannot be locked: {}", error.desc());
                    return Err(failed(target, &io::Error::other(why)));
                }
            }
            // Another process may have removed it before it was locked.
            if !part.file.metadata().is_ok_and(|found| found.nlink() == 0) {
                return Ok(part);
            }
        }
        let why = "each file created there was removed, or locked by another process, at once";
        Err(failed(target, &io::Error::other(why)))
    }

    /// Gives the complete message its name. False if the name exists.
    fn link_as(&self, target: &Path) -> Result<bool> {
        let cwd = nix::fcntl::AT_FDCWD;
        let named = match &self.name {
            None => {
                let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                linkat(cwd, &*own, cwd, target, AtFlags::AT_SYMLINK_FOLLOW)
            }
            Some(name) => {
                match renameat2(cwd, name, cwd, target, RenameFlags::RENAME_NOREPLACE) {
                    // Some file systems do not support that, but do support a second link; the
                    // first one is removed with the partial file.
                    Err(Errno::EINVAL | Errno::ENOSYS) => {
                        linkat(cwd, name, cwd, target, AtFlags::empty())
                    }
                    renamed => renamed,
                }
            }
        };
        match named {
            Ok(()) => Ok(true),
            Err(Errno::EEXIST) => Ok(false),
            Err(error) => Err(failed(target, &error.into())),
        }
    }
}

impl Sink {
    pub(super) fn output() -> Self {
        let output = io::stdout();
        let copy = output.as_fd().try_clone_to_owned();
        let is_file = copy.and_then(|copy| File::from(copy).metadata());
        let is_file = is_file.is_ok_and(|metadata| metadata.is_file());
        let is_terminal = output.is_terminal();
        // Writes to a file do not block, and those to a terminal not for long.
        let write_size = if is_file || is_terminal { usize::MAX } else { PIPE_WRITE_SIZE };
        Self::Output { write_size, is_terminal }
    }

    /// Waits for the reader, if the file is a pipe: `is_waiting` is set when that was reported.
    pub(super) fn file(path: &Path, signals: &Signals, is_waiting: &mut bool) -> Result<Self> {
        let mut options = OpenOptions::new();
        options.append(true).create(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
        let mut is_reported = false;
        loop {
            let error = match options.open(path) {
                Ok(file) => return Ok(Self::File(path.to_owned(), file)),
                Err(error) => error,
            };
            let is_pipe = path.metadata().is_ok_and(|found| found.file_type().is_fifo());
            if !is_pipe || error.raw_os_error() != Some(libc::ENXIO) {
                return Err(failed(path, &error));
            }
            if !is_reported {
                (is_reported, *is_waiting) = (true, true);
                let line = format!("fabricast: waiting for a reader of {}", path.display());
                text::print_error(&line);
            }
            signals.pause(SLICE / 2)?;
        }
    }

    /// Numbers continue after those of existing messages. Tries at once to create a file as for
    /// messages, so that an unwritable directory is reported before any message is read.
    pub(super) fn directory(path: &Path) -> Result<Self> {
        std::fs::create_dir_all(path).map_err(|error| failed(path, &error))?;
        remove_stale_parts(path);
        let number = highest_number(path).map_err(|error| failed(path, &error))?;
        let next = named(path, number.saturating_add(1));
        let is_unnamed = PartialFile::supports_unnamed(path, &next)?;
        if !is_unnamed {
            drop(PartialFile::named(&next)?);
        }
        Ok(Self::Directory { path: path.to_owned(), number, is_unnamed, part: None })
    }

    pub(super) fn wants_bytes(&self) -> bool {
        !matches!(self, Self::Discard)
    }

    pub(super) fn begin(&mut self) -> Result<()> {
        if let Self::Directory { path, number, is_unnamed, part } = self {
            *part = Some(match is_unnamed {
                true => PartialFile::unnamed(path)?,
                false => PartialFile::named(&named(path, number.saturating_add(1)))?,
            });
        }
        Ok(())
    }

    pub(super) fn write(&mut self, bytes: &[u8], signals: &Signals) -> Result<()> {
        let to_file = |path: &Path, file: &File| {
            let written = write_all(file.as_fd(), bytes, usize::MAX, signals)?;
            written.map_err(|error| failed(path, &error.into()))
        };
        match self {
            Self::Discard | Self::Directory { part: None, .. } => Ok(()),
            Self::Output { is_terminal: true, .. } if is_binary(bytes) => {
                let why = "write message to terminal failed: it is binary. Use --file or --into, or --check or --stats, \
                           or pipe it through cat";
                Err(Failure::new(Exit::Usage, why))
            }
            Self::Output { write_size, .. } => {
                match write_all(io::stdout().as_fd(), bytes, *write_size, signals)? {
                    Ok(()) => Ok(()),
                    // A closed pipe is not reported, and ends the program.
                    Err(Errno::EPIPE) => Err(Failure::silent(Exit::OutputClosed)),
                    Err(error) => Err(Failure::failed(format!(
                        "write standard output failed: {}",
                        error.desc()
                    ))),
                }
            }
            Self::File(path, file) => to_file(path, file),
            Self::Directory { path, part: Some(part), .. } => to_file(path, &part.file),
        }
    }

    pub(super) fn end(&mut self) -> Result<()> {
        let Self::Directory { path, number, part, .. } = self else { return Ok(()) };
        let Some(part) = part.take() else { return Ok(()) };
        loop {
            // Other processes may write in the directory, too.
            *number = number
                .checked_add(1)
                .ok_or_else(|| failed(path, &io::Error::other("message numbers are exhausted")))?;
            if part.link_as(&named(path, *number))? {
                return Ok(());
            }
        }
    }
}

/// Is it binary? A piece of text may begin and end within a character.
fn is_binary(bytes: &[u8]) -> bool {
    let is_continuation = |byte: &&u8| **byte & 0xc0 == 0x80;
    let cut = bytes.iter().take(3).take_while(is_continuation).count();
    match std::str::from_utf8(&bytes[cut..]) {
        Ok(text) => text.contains('\0'),
        Err(error) => error.error_len().is_some() || bytes.contains(&0),
    }
}

fn named(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("{number:0DIGITS$}"))
}

/// The highest number that is a file name in the directory; 0 if there is none.
fn highest_number(directory: &Path) -> io::Result<u64> {
    let mut highest_number = 0;
    for entry in std::fs::read_dir(directory)? {
        let name = entry?.file_name();
        let digits = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
        let number = digits.filter(|digits| digits.len() >= DIGITS).map(str::parse);
        // A name beyond all numbers blocks none.
        highest_number = number
            .and_then(Result::ok)
            .map_or(highest_number, |number: u64| number.max(highest_number));
    }
    Ok(highest_number)
}

/// A random name for a partial file.
fn part_name(target: &Path) -> Result<PathBuf> {
    let random = getrandom::u64()
        .map_err(|error| Failure::failed(format!("generate a file name failed: {error}")))?;
    Ok(target.with_extension(format!("{random:016x}{PART_SUFFIX}")))
}

/// Locks the file while it is open.
fn lock(file: File) -> Result<Flock<File>, (File, Errno)> {
    Flock::lock(file, FlockArg::LockExclusiveNonblock)
}

/// Is it the name of a partial file?
fn is_part(name: &str) -> bool {
    let Some((number, random)) =
        name.strip_suffix(PART_SUFFIX).and_then(|name| name.split_once('.'))
    else {
        return false;
    };
    let is_drawn = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    number.len() >= DIGITS
        && number.bytes().all(|byte| byte.is_ascii_digit())
        && random.len() == 16
        && random.bytes().all(is_drawn)
}

/// Removes partial files of killed processes of this user: those that are not locked. Unclear ones
/// are left.
fn remove_stale_parts(directory: &Path) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        if !entry.file_name().to_str().is_some_and(is_part) {
            continue;
        }
        let path = entry.path();
        let mut options = OpenOptions::new();
        options.write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let Ok(file) = options.open(&path) else { continue };
        let Ok(found) = file.metadata() else { continue };
        if !found.is_file() || found.uid() != nix::unistd::geteuid().as_raw() {
            continue;
        }
        if let Ok(_lock) = lock(file)
            && std::fs::remove_file(&path).is_ok()
        {
            tracing::warn!(path = %path.display(), "removed an incomplete file of a killed subscriber");
        }
    }
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    Failure::failed(format!("write {} failed: {error}", path.display()))
}

/// Writes in pieces and waits for signals meanwhile, since the reader may be slow. The outer
/// failure is an interrupt, the inner one of the system.
fn write_all(
    to: BorrowedFd<'_>,
    mut bytes: &[u8],
    write_size: usize,
    signals: &Signals,
) -> Result<Result<(), Errno>> {
    while !bytes.is_empty() {
        signals.check_interrupted()?;
        while !signals.wait_for(to, PollFlags::POLLOUT, SIGNAL_POLL_INTERVAL) {
            if signals.termination_requested() {
                return Err(interrupted());
            }
        }
        match nix::unistd::write(to, &bytes[..bytes.len().min(write_size)]) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(error) => return Ok(Err(error)),
        }
    }
    Ok(Ok(()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("fabricast-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    fn names(path: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(path).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    /// A sink of named files, as on file systems without unnamed ones.
    fn by_names(path: &Path) -> Sink {
        let mut sink = Sink::directory(path).unwrap();
        if let Sink::Directory { is_unnamed, .. } = &mut sink {
            *is_unnamed = false;
        }
        sink
    }

    #[test]
    fn binary_content_is_detected() {
        let text = "grüße €".as_bytes();
        assert!(!is_binary(b"") && !is_binary(b"hello\x1b[0m\n"));
        // Cut at any byte, at both ends.
        for from in 0..text.len() {
            for to in from..=text.len() {
                assert!(!is_binary(&text[from..to]), "{from}..{to}");
            }
        }
        for binary in [&b"a\0"[..], b"\0", &[0xff, 0xfe], &[b'a', 0x80, b'b'], &[0x80; 4]] {
            assert!(is_binary(binary), "{binary:?}");
        }
    }

    #[test]
    fn two_subscribers_write_to_one_directory_without_conflict() {
        let path = directory("sink-two");
        let signals = Signals::catch().unwrap();
        let [mut one, mut other] = [(); 2].map(|()| Sink::directory(&path).unwrap());
        one.begin().unwrap();
        other.begin().unwrap();
        one.write(b"one", &signals).unwrap();
        other.write(b"other", &signals).unwrap();
        one.end().unwrap();
        other.end().unwrap();
        one.begin().unwrap();
        one.write(b"next", &signals).unwrap();
        one.end().unwrap();
        let read = |name: &str| std::fs::read(path.join(name)).unwrap();
        assert_eq!(names(&path), ["00000001", "00000002", "00000003"]);
        assert!(read("00000001") == b"one" && read("00000002") == b"other");
        assert_eq!(read("00000003"), b"next");
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn numbers_continue_after_any_existing_name() {
        let path = directory("sink-used");
        let signals = Signals::catch().unwrap();
        for name in ["00000007", "9", "000000x8", "99999999999999999999999", "notes"] {
            std::fs::write(path.join(name), name).unwrap();
        }
        std::fs::create_dir(path.join("00000100")).unwrap();
        std::os::unix::fs::symlink("/nowhere/at/all", path.join("123456789")).unwrap();
        let mut sink = Sink::directory(&path).unwrap();
        assert_eq!(names(&path).len(), 7, "nothing is left of the attempt to write there");
        sink.begin().unwrap();
        sink.write(b"message", &signals).unwrap();
        sink.end().unwrap();
        assert_eq!(std::fs::read(path.join("123456790")).unwrap(), b"message");
        // No number is left after the last one.
        std::fs::write(path.join(u64::MAX.to_string()), "").unwrap();
        let mut sink = Sink::directory(&path).unwrap();
        sink.begin().unwrap();
        let why = sink.end().unwrap_err().to_string();
        assert!(why.contains("numbers are exhausted"), "{why}");
        std::fs::remove_dir_all(path).unwrap();
        // An unwritable directory is reported at once, also to root.
        assert!(Sink::directory(Path::new("/proc/self")).is_err());
    }

    #[test]
    fn links_are_not_followed_and_partial_files_are_removed() {
        let path = directory("sink-links");
        let signals = Signals::catch().unwrap();
        let victim = path.join("victim");
        std::fs::write(&victim, "dear").unwrap();
        std::os::unix::fs::symlink(&victim, path.join("00000001.part")).unwrap();
        let mut sink = Sink::directory(&path).unwrap();
        sink.begin().unwrap();
        sink.write(b"message", &signals).unwrap();
        sink.end().unwrap();
        sink.begin().unwrap();
        sink.write(b"half of", &signals).unwrap();
        drop(sink);
        assert_eq!(std::fs::read(&victim).unwrap(), b"dear");
        assert_eq!(names(&path), ["00000001", "00000001.part", "victim"]);
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn partial_file_takes_a_free_name_or_is_removed() {
        let path = directory("sink-parts");
        std::fs::write(path.join("taken"), "dear").unwrap();
        let create = |target| match target {
            "one" => PartialFile::unnamed(&path).unwrap(),
            _ => PartialFile::named(&path.join("00000001")).unwrap(),
        };
        for target in ["one", "other"] {
            drop(create(target));
            let part = create(target);
            (&*part.file).write_all(target.as_bytes()).unwrap();
            assert!(!part.link_as(&path.join("taken")).unwrap());
            assert!(part.link_as(&path.join(target)).unwrap());
            drop(part);
            assert_eq!(std::fs::read(path.join(target)).unwrap(), target.as_bytes());
        }
        assert_eq!(names(&path), ["one", "other", "taken"]);
        assert_eq!(std::fs::read(path.join("taken")).unwrap(), b"dear");
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn only_partial_files_of_killed_subscribers_are_removed() {
        let path = directory("sink-dead");
        let signals = Signals::catch().unwrap();
        let mut living = by_names(&path);
        living.begin().unwrap();
        living.write(b"half of", &signals).unwrap();
        let [half] = &names(&path)[..] else { panic!() };
        let strange =
            ["00000001.part", "notes.0123456789abcdef.part", "00000001.0123456789abcdeg.part"];
        for name in strange.into_iter().chain(["00000001.0123456789abcdef.part"]) {
            std::fs::write(path.join(name), name).unwrap();
        }
        let link = "00000002.0123456789abcdef.part";
        std::os::unix::fs::symlink(path.join(strange[0]), path.join(link)).unwrap();
        // Root could remove files of other users.
        let others = "00000003.0123456789abcdef.part";
        std::fs::write(path.join(others), others).unwrap();
        let is_set = std::os::unix::fs::chown(path.join(others), Some(1), None).is_ok();
        let _next = Sink::directory(&path).unwrap();
        let mut left: Vec<_> = strange.into_iter().chain([half.as_str(), link]).collect();
        left.extend(is_set.then_some(others));
        left.sort_unstable();
        assert_eq!(names(&path), left);
        living.end().unwrap();
        assert_eq!(std::fs::read(path.join("00000001")).unwrap(), b"half of");
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn failure_of_the_lock_is_an_error() {
        let path = directory("sink-unlocked");
        let target = path.join("00000001");
        let attempts = std::cell::Cell::new(0);
        let create = |error| {
            attempts.set(0);
            PartialFile::create_named_with(&target, |file| {
                attempts.set(attempts.get() + 1);
                Err((file, error))
            })
        };
        for error in [Errno::ENOLCK, Errno::EMFILE] {
            let why = create(error).unwrap_err().to_string();
            assert!(why.contains("cannot be locked") && attempts.get() == 1, "{why}");
        }
        for error in [Errno::EOPNOTSUPP, Errno::ENOTSUP, Errno::ENOSYS] {
            assert!(matches!(create(error).unwrap().file, PartialFileHandle::Unlocked(_)));
        }
        // The number of attempts is limited.
        let why = create(Errno::EWOULDBLOCK).unwrap_err().to_string();
        assert!(why.contains("00000001") && attempts.get() == ATTEMPTS, "{why}");
        let removed = PartialFile::create_named_with(&target, |file| {
            for name in names(&path) {
                std::fs::remove_file(path.join(name)).unwrap();
            }
            lock(file)
        });
        assert!(removed.is_err());
        assert!(names(&path).is_empty(), "nothing is left of it");
        std::fs::remove_dir_all(path).unwrap();
    }
}
