//! The terminal of an output, if it is one: its width, and which escape sequences it takes.
#![allow(unsafe_code)]

use std::io::IsTerminal;
use std::os::fd::{AsFd, AsRawFd};

/// Columns of the terminal; None if the output is no terminal, or its size is unknown.
#[must_use]
pub fn columns(output: &(impl AsFd + IsTerminal)) -> Option<usize> {
    if !output.is_terminal() {
        return None;
    }
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    let fd = output.as_fd().as_raw_fd();
    // SAFETY: an open descriptor, and space for the result.
    let found = unsafe { libc::ioctl(fd, libc::TIOCGWINSZ, &raw mut size) } == 0;
    (found && size.ws_col > 0).then_some(usize::from(size.ws_col))
}

/// Can lines on this output be overwritten, by a carriage return? Not on a dumb terminal.
#[must_use]
pub fn redraws_lines(output: &impl IsTerminal) -> bool {
    let is_dumb = std::env::var_os("TERM").is_none_or(|name| name.is_empty() || name == "dumb");
    output.is_terminal() && !is_dumb
}

/// Does this output take escape sequences? Not with `NO_COLOR`.
#[must_use]
pub fn takes_escapes(output: &impl IsTerminal) -> bool {
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    redraws_lines(output) && !is_plain
}
