//! The messages to publish: standard input, files, or the test pattern.

use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, IsTerminal, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::poll::PollFlags;
use pubsub::Loan;

use super::LengthLimit;
use crate::cli::exit::{Exit, Failure, Result};
use crate::cli::open_topic::round_up_to_4k;
use crate::cli::signals::{Signals, interrupted};
use crate::cli::test_pattern::Content;
use crate::cli::{size, text};

/// Bytes read at a time.
const CHUNK: usize = 1 << 20;
/// The longest message that is read into memory without a `largest` setting.
const DEFAULT_MAX_LENGTH: u64 = 1 << 30;
const SIGNAL_POLL_INTERVAL: Duration = Duration::from_secs(1);
const INPUT: &str = "standard input";
/// A signal ended the process during a read; no other read error has this kind.
const INTERRUPTED: io::ErrorKind = io::ErrorKind::ConnectionAborted;
/// Bytes copied to a device at a time, since starting a copy there takes much longer than on the
/// host.
const DEVICE_COPY_SIZE: usize = 16 << 20;

/// A message that is not in the memory of its topic yet.
#[derive(Debug)]
pub(super) enum Message {
    Bytes(Vec<u8>),
    File { path: PathBuf, file: File, length: u64 },
    Pattern(Content),
}

impl Message {
    pub(super) fn length(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::File { length, .. } => *length,
            Self::Pattern(content) => content.length,
        }
    }

    /// The source, for messages.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Bytes(_) => INPUT.to_owned(),
            Self::File { path, .. } => path.display().to_string(),
            Self::Pattern(_) => "test pattern".to_owned(),
        }
    }

    /// Copies it to the memory of the topic. Fails if a signal ends the process meanwhile.
    pub(super) fn fill(
        self,
        loan: &mut Loan,
        buffer: &mut Vec<u8>,
        signals: &Signals,
    ) -> Result<()> {
        let mut write = |offset: u64, part: &[u8]| -> Result<()> {
            signals.check_interrupted()?;
            Ok(loan.write(offset, part)?)
        };
        match self {
            Self::Bytes(bytes) => {
                let mut parts = bytes.chunks(DEVICE_COPY_SIZE).enumerate();
                parts.try_for_each(|(at, part)| write((at * DEVICE_COPY_SIZE) as u64, part))
            }
            Self::Pattern(content) => content.write(buffer, write),
            Self::File { path, mut file, length } => {
                buffer.resize(CHUNK, 0);
                let mut offset = 0;
                while offset < length {
                    let part = (length - offset).min(CHUNK as u64) as usize;
                    file.read_exact(&mut buffer[..part]).map_err(|error| match error.kind() {
                        io::ErrorKind::UnexpectedEof => Failure::failed(format!(
                            "read {} failed: the file became shorter",
                            path.display()
                        )),
                        _ => failed(path.display(), &error),
                    })?;
                    write(offset, &buffer[..part])?;
                    offset += part as u64;
                }
                Ok(())
            }
        }
    }
}

impl LengthLimit<'_> {
    /// The longest message that is read into memory.
    fn maximum(&self) -> u64 {
        self.largest.unwrap_or(DEFAULT_MAX_LENGTH)
    }

    /// Fails for a message of this length if it is too long.
    pub(super) fn check(&self, name: impl Display, length: u64) -> Result<()> {
        if length <= self.maximum() { Ok(()) } else { Err(self.too_long(name, Some(length))) }
    }

    /// The error for a longer message, with its length if known.
    fn too_long(&self, name: impl Display, length: Option<u64>) -> Failure {
        let maximum = self.maximum();
        let name = text::escape_control(&name.to_string());
        let has = match length {
            Some(length) => text::count_of(length, "byte"),
            None => format!("more than {}", text::count_of(maximum, "byte")),
        };
        let largest = match length {
            Some(length) => {
                let size = size::print(round_up_to_4k(length));
                format!("--largest {}", size.strip_suffix("iB").unwrap_or(&size))
            }
            None => "a larger --largest".to_owned(),
        };
        let topic = self.topic.escape_debug();
        let why = match (self.largest, self.origin) {
            (None, _) => format!(
                "publish {name} failed: it has {has}, and without --largest at most {maximum} bytes are read. Create topic \"{topic}\" with \
                 {largest}"
            ),
            (Some(_), Some(origin)) => format!(
                "publish {name} failed: it has {has}, topic \"{topic}\" allows {maximum} ({origin}). Use {largest}, and \
                 another name if other processes use the topic"
            ),
            (Some(_), None) => format!(
                "publish {name} failed: it has {has}, topic \"{topic}\" allows {maximum}. Use another topic name with {largest}, \
                 or stop the processes that use the topic first"
            ),
        };
        Failure::new(Exit::LimitExceeded, why)
    }
}

fn print_at_terminal(what: &str) {
    if io::stdin().is_terminal() {
        text::print_error(&format!("fabricast: {what}"));
    }
}

fn failed(name: impl Display, error: &io::Error) -> Failure {
    match error.kind() {
        INTERRUPTED => interrupted(),
        _ => Failure::failed(format!("read {name} failed: {error}")),
    }
}

#[derive(Debug)]
pub(super) enum Input<'a> {
    /// One message, which was read already.
    Whole(Option<Vec<u8>>),
    /// Each line is a message.
    Lines(BufReader<InterruptibleReader<'a, io::Stdin>>),
    Files(std::vec::IntoIter<PathBuf>),
    Pattern {
        next: Content,
        left: Option<u64>,
    },
}

impl<'a> Input<'a> {
    /// All of standard input.
    pub(super) fn whole(limit: LengthLimit<'_>, signals: &Signals) -> Result<Self> {
        print_at_terminal(
            "reading one message from the terminal; end it with Ctrl-D (with --lines, each line is a message)",
        );
        let source = InterruptibleReader { descriptor: io::stdin(), signals };
        Ok(Self::Whole(Some(whole(source, INPUT, limit)?)))
    }

    /// Each line of standard input.
    pub(super) fn lines(signals: &'a Signals) -> Self {
        let source = InterruptibleReader { descriptor: io::stdin(), signals };
        Self::Lines(BufReader::with_capacity(CHUNK / 16, source))
    }

    /// Prints a hint if the input is a terminal.
    pub(super) fn print_terminal_hint(&self) {
        if let Self::Lines(_) = self {
            print_at_terminal("reading messages from the terminal, one a line; end with Ctrl-D");
        }
    }

    /// The largest length of the messages, where known before they are read.
    pub(super) fn largest(&self) -> Option<u64> {
        match self {
            Self::Files(paths) => {
                let lengths = paths.as_slice().iter().filter_map(|path| path.metadata().ok());
                lengths.filter(|found| found.is_file()).map(|found| found.len()).max()
            }
            Self::Pattern { next, .. } => Some(next.length),
            Self::Whole(bytes) => bytes.as_ref().map(|bytes| bytes.len() as u64),
            Self::Lines(_) => None,
        }
    }

    /// The next message, unless it is known to be too long.
    pub(super) fn next(
        &mut self,
        limit: LengthLimit<'_>,
        signals: &Signals,
    ) -> Result<Option<Message>> {
        match self {
            Self::Whole(bytes) => Ok(bytes.take().map(Message::Bytes)),
            Self::Lines(lines) => Ok(line(lines, limit)?.map(Message::Bytes)),
            Self::Files(paths) => paths.next().map(|path| open(path, limit, signals)).transpose(),
            Self::Pattern { left: Some(0), .. } => Ok(None),
            Self::Pattern { next, left } => {
                let content = *next;
                next.number += 1;
                if let Some(left) = left {
                    *left -= 1;
                }
                Ok(Some(Message::Pattern(content)))
            }
        }
    }
}

/// Opens a file. A long file is read when it is published. A short one is read at once, as pipes
/// are: the length of files in /proc is meaningless.
fn open(path: PathBuf, limit: LengthLimit<'_>, signals: &Signals) -> Result<Message> {
    // Opening a pipe without a writer would block signals, so it is not blocking.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(&path);
    let opened = opened.and_then(|file| Ok((file.metadata()?, file)));
    let (found, file) = opened.map_err(|error| failed(path.display(), &error))?;
    if found.is_file() && limit.largest.is_some() {
        limit.check(path.display(), found.len())?;
    }
    if found.is_file() && found.len() > CHUNK as u64 {
        return Ok(Message::File { path, file, length: found.len() });
    }
    let source = InterruptibleReader { descriptor: file, signals };
    whole(source, path.display(), limit).map(Message::Bytes)
}

/// Reads input and waits for signals at the same time.
#[derive(Debug)]
pub(super) struct InterruptibleReader<'a, F> {
    descriptor: F,
    signals: &'a Signals,
}

impl<F: AsFd> Read for InterruptibleReader<'_, F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let descriptor = self.descriptor.as_fd();
        loop {
            let is_ready =
                self.signals.wait_for(descriptor, PollFlags::POLLIN, SIGNAL_POLL_INTERVAL);
            if self.signals.termination_requested() {
                return Err(INTERRUPTED.into());
            }
            if !is_ready {
                continue;
            }
            match nix::unistd::read(descriptor, buffer) {
                Err(Errno::EINTR | Errno::EAGAIN) => {}
                read => return Ok(read?),
            }
        }
    }
}

/// The whole input.
fn whole(from: impl Read, name: impl Display, limit: LengthLimit<'_>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let maximum = limit.maximum();
    let read = from.take(maximum.saturating_add(1)).read_to_end(&mut bytes);
    read.map_err(|error| failed(&name, &error))?;
    if bytes.len() as u64 > maximum { Err(limit.too_long(name, None)) } else { Ok(bytes) }
}

/// The next line, without its line feed.
fn line(from: &mut impl BufRead, limit: LengthLimit<'_>) -> Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    // The line feed, and one byte more, which shows that the line is too long.
    let maximum = limit.maximum();
    from.take(maximum.saturating_add(2))
        .read_until(b'\n', &mut line)
        .map_err(|error| failed(INPUT, &error))?;
    if line.is_empty() {
        return Ok(None);
    }
    line.pop_if(|last| *last == b'\n');
    match line.len() as u64 > maximum {
        true => Err(limit.too_long("a line of standard input", None)),
        false => Ok(Some(line)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(largest: Option<u64>) -> LengthLimit<'static> {
        LengthLimit { topic: "t", largest, origin: None }
    }

    fn lines_of(parts: &[&str]) -> Vec<String> {
        // Each part arrives by itself, as from a pipe.
        let none: Box<dyn BufRead> = Box::new(io::empty());
        let mut all = parts.iter().fold(none, |all, part| Box::new(all.chain(part.as_bytes())));
        let lines = std::iter::from_fn(|| line(&mut all, limit(None)).unwrap());
        lines.map(|line| String::from_utf8(line).unwrap()).collect()
    }

    #[test]
    fn too_long_line_is_an_error() {
        let fits = |text: &str, longest| line(&mut text.as_bytes(), limit(Some(longest))).is_ok();
        assert!(fits("abc", 3) && fits("abc\n", 3) && fits("abc\nabcdef", 3));
        assert!(!fits("abcd", 3) && !fits("abcd\n", 3) && !fits("abcdefghi", 3));
    }

    #[test]
    fn lines_end_with_line_feed_or_end_of_input() {
        assert_eq!(lines_of(&["a\nb", "c\n", "\nd"]), ["a", "bc", "", "d"]);
        assert_eq!(lines_of(&["a\n"]), ["a"]);
        assert_eq!(lines_of(&["", ""]), [""; 0]);
        assert_eq!(lines_of(&["\n"]), [""]);
    }

    #[test]
    fn pattern_ends_after_its_number_of_messages() {
        let signals = Signals::catch().unwrap();
        let next = Content { run: 1, number: 0, length: 64 };
        let mut input = Input::Pattern { next, left: Some(2) };
        assert_eq!(input.largest(), Some(64));
        for number in 0..2 {
            let Some(Message::Pattern(content)) = input.next(limit(None), &signals).unwrap() else {
                panic!("a pattern gives patterns")
            };
            assert_eq!(content, Content { number, ..next });
        }
        assert!(input.next(limit(None), &signals).unwrap().is_none());
    }

    #[test]
    fn files_of_proc_are_read_to_their_end() {
        let signals = Signals::catch().unwrap();
        let path = PathBuf::from("/proc/self/stat");
        assert_eq!(path.metadata().unwrap().len(), 0);
        let mut input = Input::Files(vec![path.clone(), path].into_iter());
        let Some(Message::Bytes(bytes)) = input.next(limit(None), &signals).unwrap() else {
            panic!("short files are read at once")
        };
        let number = format!("{} ", std::process::id());
        assert!(bytes.starts_with(number.as_bytes()), "{bytes:?}");
        let failure = input.next(limit(Some(8)), &signals).unwrap_err();
        assert_eq!(failure.exit(), Exit::LimitExceeded);
    }

    #[test]
    fn long_file_is_read_when_it_is_published() {
        let signals = Signals::catch().unwrap();
        let path = std::env::temp_dir().join(format!("fabricast-input-{}", std::process::id()));
        let length = CHUNK as u64 + 1;
        std::fs::write(&path, vec![7; length as usize]).unwrap();
        let paths = vec![path.clone(), "/dev/null".into(), "/nowhere/at/all".into()];
        let mut input = Input::Files(paths.into_iter());
        assert_eq!(input.largest(), Some(length));
        let first = input.next(limit(None), &signals).unwrap().unwrap();
        assert!(matches!(first, Message::File { .. }) && first.length() == length, "{first:?}");
        assert_eq!(input.next(limit(None), &signals).unwrap().unwrap().length(), 0);
        assert!(
            input.next(limit(None), &signals).unwrap_err().to_string().contains("/nowhere/at/all")
        );
        std::fs::remove_file(path).unwrap();
    }
}
