//! Where messages go that were read.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::PollFlags;

use crate::cli::exit::{Exit, Failure};
use crate::cli::signals::{Signals, interrupted};

/// A pipe with room has room for so many bytes at least, and takes them without waiting.
const AT_ONCE: usize = 4096;
const LOOK: Duration = Duration::from_secs(1);

/// Where messages go.
#[derive(Debug)]
pub(super) enum Sink {
    /// Nowhere: they are only looked at.
    Nowhere,
    /// To standard output, one behind the other; so many bytes at once.
    Output(usize),
    /// To the end of a file.
    File(PathBuf, File),
    /// Each to a file of its own, numbered.
    Directory { path: PathBuf, number: u64, part: Option<File> },
}

impl Sink {
    pub(super) fn output() -> Self {
        let output = io::stdout();
        let copy = output.as_fd().try_clone_to_owned();
        let is_file = copy.and_then(|copy| File::from(copy).metadata());
        let is_file = is_file.is_ok_and(|metadata| metadata.is_file());
        // A file lets nobody wait, nor does a terminal for long.
        Self::Output(if is_file || output.is_terminal() { usize::MAX } else { AT_ONCE })
    }

    pub(super) fn file(path: &Path) -> Result<Self, Failure> {
        let file = OpenOptions::new().append(true).create(true).open(path);
        let file = file.map_err(|error| failed(path, &error))?;
        Ok(Self::File(path.to_owned(), file))
    }

    pub(super) fn directory(path: &Path) -> Result<Self, Failure> {
        std::fs::create_dir_all(path).map_err(|error| failed(path, &error))?;
        Ok(Self::Directory { path: path.to_owned(), number: 0, part: None })
    }

    /// Does it want the bytes?
    pub(super) fn takes(&self) -> bool {
        !matches!(self, Self::Nowhere)
    }

    /// The next message begins.
    pub(super) fn begin(&mut self) -> Result<(), Failure> {
        if let Self::Directory { path, number, part } = self {
            *number += 1;
            let target = named(path, *number);
            if target.symlink_metadata().is_ok() {
                let why = io::Error::from(ErrorKind::AlreadyExists);
                return Err(failed(&target, &why));
            }
            let name = target.with_extension("part");
            *part = Some(File::create(&name).map_err(|error| failed(&name, &error))?);
        }
        Ok(())
    }

    pub(super) fn write(&mut self, bytes: &[u8], signals: &Signals) -> Result<(), Failure> {
        match self {
            Self::Nowhere => Ok(()),
            Self::Output(at_once) => to_output(bytes, *at_once, signals),
            Self::File(path, file) => file.write_all(bytes).map_err(|error| failed(path, &error)),
            Self::Directory { path, part, .. } => match part {
                Some(part) => part.write_all(bytes).map_err(|error| failed(path, &error)),
                None => Ok(()),
            },
        }
    }

    /// The message is complete: only now does it get its name, where it has one.
    pub(super) fn end(&mut self) -> Result<(), Failure> {
        if let Self::Directory { path, number, part } = self {
            *part = None;
            let target = named(path, *number);
            std::fs::rename(target.with_extension("part"), &target)
                .map_err(|error| failed(&target, &error))?;
        }
        Ok(())
    }
}

fn named(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("{number:08}"))
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    Failure::failed(format!("writing {}: {error}", path.display()))
}

/// Not at once: whoever reads may be slow, and this process is to hear a signal meanwhile.
fn to_output(mut bytes: &[u8], at_once: usize, signals: &Signals) -> Result<(), Failure> {
    let output = io::stdout();
    while !bytes.is_empty() {
        while !signals.wait_for(output.as_fd(), PollFlags::POLLOUT, LOOK) {
            if signals.ask_to_end() {
                return Err(interrupted());
            }
        }
        match nix::unistd::write(output.as_fd(), &bytes[..bytes.len().min(at_once)]) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            // That nobody reads on is no reason for noise, but one to stop.
            Err(Errno::EPIPE) => return Err(Failure::silent(Exit::Failed)),
            Err(error) => {
                return Err(Failure::failed(format!("writing the output: {}", error.desc())));
            }
        }
    }
    Ok(())
}
