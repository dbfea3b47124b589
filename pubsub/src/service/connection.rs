//! A connection that never holds up the service: what cannot be sent now waits.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, Participant};

use super::protocol::{self, Notice};

/// Messages that may wait for one who does not listen.
const MAX_QUEUED_MESSAGES: usize = 4096;
/// Their bytes: more than any report has.
const MAX_QUEUED_BYTES: usize = 16 << 20;
/// Their descriptors, which all others would lack: those of all lives, and as many more.
const MAX_QUEUED_DESCRIPTORS: usize = 2 * Participant::SLOTS as usize;

/// Descriptors that may wait for all together: a process has 1024, if nothing else was set up.
const MAX_QUEUED_DESCRIPTORS_TOTAL: usize = 2 * Participant::SLOTS as usize;
/// And those of such as have taken nothing for a while: one that joins is told all lives at once,
/// and takes them.
const MAX_QUEUED_DESCRIPTORS_STALLED: usize = Participant::SLOTS as usize / 4;
const STALL_TIMEOUT: Duration = Duration::from_secs(2);

/// Descriptors on their way to one who does not take them. The system counts those of all
/// processes of a user together, also those sent to one that is stopped: if there were too many,
/// nobody could be sent any more.
const MAX_DESCRIPTORS_IN_FLIGHT: usize = 128;

#[derive(Debug)]
pub(super) struct Connection {
    channel: Channel,
    waiting: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    /// Of all that waits.
    bytes: usize,
    files: usize,
    /// When something went out last, or began to wait.
    last_progress: Instant,
    /// Descriptors that were sent since all had been taken.
    descriptors_in_flight: usize,
    /// What waits does so until descriptors have arrived, here or elsewhere: nothing tells when.
    is_stalled: bool,
    is_broken: bool,
}

impl Connection {
    pub(super) fn new(channel: Channel) -> Self {
        Self {
            channel,
            waiting: VecDeque::new(),
            bytes: 0,
            files: 0,
            last_progress: Instant::now(),
            descriptors_in_flight: 0,
            is_stalled: false,
            is_broken: false,
        }
    }

    pub(super) fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Sends, now or later, in order.
    pub(super) fn send(&mut self, notice: &Notice, descriptors: Vec<OwnedFd>) {
        if self.is_broken {
            return;
        }
        let bytes = protocol::encode(notice);
        if self.waiting.is_empty() {
            self.last_progress = Instant::now();
        }
        self.bytes += bytes.len();
        self.files += descriptors.len();
        self.waiting.push_back((bytes, descriptors));
        self.flush();
        let is_too_much = self.waiting.len() > MAX_QUEUED_MESSAGES
            || self.bytes > MAX_QUEUED_BYTES
            || self.files > MAX_QUEUED_DESCRIPTORS;
        if is_too_much {
            self.mark_broken();
        }
    }

    /// Sends what waits, as far as there is room. True if something was sent.
    pub(super) fn flush(&mut self) -> bool {
        let waited = self.waiting.len();
        self.send_waiting();
        self.waiting.len() < waited
    }

    fn send_waiting(&mut self) {
        self.is_stalled = false;
        while let Some((bytes, descriptors)) = self.waiting.front() {
            let descriptors_in_flight = self.descriptors_in_flight + descriptors.len();
            if !descriptors.is_empty() && descriptors_in_flight > MAX_DESCRIPTORS_IN_FLIGHT {
                self.is_stalled = self.channel.has_unreceived();
                if self.is_stalled {
                    return;
                }
                self.descriptors_in_flight = 0;
            }
            let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            match self.channel.send(bytes, &borrowed, Duration::ZERO) {
                Ok(()) => {
                    self.bytes -= bytes.len();
                    self.files -= descriptors.len();
                    self.descriptors_in_flight += descriptors.len();
                    self.last_progress = Instant::now();
                    self.waiting.pop_front();
                }
                Err(ChannelError::DeadlineExceeded { .. }) => return,
                Err(ChannelError::TooManyDescriptorsInFlight) => {
                    self.is_stalled = true;
                    return;
                }
                Err(_) => self.mark_broken(),
            }
        }
    }

    /// The other side cannot be told what it has to know: it comes back, and is told all.
    pub(super) fn mark_broken(&mut self) {
        (self.is_broken, self.is_stalled) = (true, false);
        self.waiting.clear();
        (self.bytes, self.files) = (0, 0);
    }

    /// Ends the connection for both sides, also where a child of either keeps a copy of it open.
    pub(super) fn end(&mut self) {
        self.flush();
        self.channel.end();
    }

    /// Is there something to be sent as soon as there is room?
    pub(super) fn has_queued(&self) -> bool {
        !self.waiting.is_empty() && !self.is_stalled
    }

    /// Is there something to be sent at another time, of which nobody tells?
    pub(super) fn is_stalled(&self) -> bool {
        self.is_stalled
    }

    /// Do descriptors wait?
    pub(super) fn has_queued_descriptors(&self) -> bool {
        self.files > 0
    }

    /// Is the other side gone, or so far behind that it is given up?
    pub(super) fn is_broken(&self) -> bool {
        self.is_broken
    }
}

/// Gives up those for which too many descriptors wait together, so that the service does not run out
/// of them: first those for which most do.
pub(super) fn drop_stalled<'a>(
    now: Instant,
    connections: impl Iterator<Item = &'a mut Connection>,
) {
    let mut waited: Vec<_> = connections.filter(|it| it.has_queued_descriptors()).collect();
    waited.sort_unstable_by_key(|it| it.files);
    let is_stuck =
        |it: &Connection| now.saturating_duration_since(it.last_progress) >= STALL_TIMEOUT;
    let mut all: usize = waited.iter().map(|it| it.files).sum();
    let mut stuck: usize = waited.iter().filter(|it| is_stuck(it)).map(|it| it.files).sum();
    for connection in waited.into_iter().rev() {
        let files = connection.files;
        let is_stuck = is_stuck(connection);
        if all > MAX_QUEUED_DESCRIPTORS_TOTAL
            || (is_stuck && stuck > MAX_QUEUED_DESCRIPTORS_STALLED)
        {
            tracing::debug!(
                files,
                "dropping the connection of a process that receives no descriptors"
            );
            connection.mark_broken();
            all -= files;
            stuck -= if is_stuck { files } else { 0 };
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What waits for one who does not listen, before and after it is given up.
    fn send_until_broken(notice: &Notice, files: usize) -> (usize, usize, usize) {
        let (near, _far) = Channel::pair().unwrap();
        let mut connection = Connection::new(near);
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let copies = || (0..files).map(|_| null.try_clone().unwrap()).collect();
        let mut most = (0, 0, 0);
        while !connection.is_broken() {
            let Connection { bytes, files, .. } = connection;
            most = most.max((connection.waiting.len(), bytes, files));
            connection.send(notice, copies());
        }
        assert!(!connection.has_queued());
        most
    }

    #[test]
    fn what_waits_for_one_who_does_not_listen_is_bounded() {
        let left = Notice::Left;
        let (messages, ..) = send_until_broken(&left, 0);
        assert_eq!(messages, MAX_QUEUED_MESSAGES);
        let pidfds = Notice::Pidfds { participants: vec![1; 32] };
        let (_, _, files) = send_until_broken(&pidfds, 32);
        assert!((Participant::SLOTS as usize..=MAX_QUEUED_DESCRIPTORS).contains(&files), "{files}");
        let row = crate::Row::Subscriber {
            topic: "x".repeat(200),
            participant: "y".repeat(200),
            behind: 0,
            missed: 0,
        };
        let rows = Notice::Rows { request: 1, rows: vec![row; 64], is_last: false };
        let (messages, bytes, _) = send_until_broken(&rows, 0);
        assert!(
            messages < MAX_QUEUED_MESSAGES && bytes <= MAX_QUEUED_BYTES,
            "{messages} of {bytes}"
        );
    }

    /// Receives all that is there, as the number of a participant each.
    fn taken(far: &Channel) -> Vec<u32> {
        let mut all = Vec::new();
        while let Ok(message) = far.receive(Duration::ZERO) {
            match protocol::decode("test", &message.bytes).unwrap() {
                Notice::Pidfds { participants } => all.extend(participants),
                other => panic!("{other:?}"),
            }
            assert_eq!(message.descriptors.len(), 1);
        }
        all
    }

    #[test]
    fn one_who_takes_nothing_has_few_descriptors_on_their_way() {
        let (near, far) = Channel::pair().unwrap();
        let mut connection = Connection::new(near);
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        for number in 0..300 {
            let notice = Notice::Pidfds { participants: vec![number] };
            connection.send(&notice, vec![null.try_clone().unwrap()]);
        }
        assert!(connection.is_stalled() && !connection.has_queued());
        connection.flush();
        let mut all = taken(&far);
        assert_eq!(all.len(), MAX_DESCRIPTORS_IN_FLIGHT);
        while connection.is_stalled() {
            connection.flush();
            all.extend(taken(&far));
        }
        assert!(all.into_iter().eq(0..300) && !connection.is_broken());
    }

    #[test]
    fn those_that_take_nothing_do_not_use_up_all_descriptors_together() {
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        // For each of them so many wait.
        let waits = |files: usize| {
            let (near, far) = Channel::pair().unwrap();
            let mut connection = Connection::new(near);
            for _ in 0..MAX_DESCRIPTORS_IN_FLIGHT + files {
                let notice = Notice::Pidfds { participants: vec![1] };
                connection.send(&notice, vec![null.try_clone().unwrap()]);
            }
            assert_eq!(connection.files, files);
            (connection, far)
        };
        let all_of =
            |files: [usize; 3]| -> (Vec<_>, Vec<_>) { files.map(waits).into_iter().unzip() };
        let broken = |all: &[Connection]| all.iter().map(Connection::is_broken).collect::<Vec<_>>();
        let (mut all, fars) = all_of([20, 200, 100]);
        let now = Instant::now();
        drop_stalled(now, all.iter_mut());
        assert_eq!(broken(&all), [false; 3], "they have their time");
        // One of them goes on.
        all[2].last_progress = now + STALL_TIMEOUT;
        drop_stalled(now + STALL_TIMEOUT, all.iter_mut());
        assert_eq!(broken(&all), [false, true, false]);
        assert!(!all[1].has_queued_descriptors());
        drop((all, fars));
        let (mut all, _fars) = all_of([200, 20, 300]);
        drop_stalled(Instant::now(), all.iter_mut());
        assert_eq!(broken(&all), [false, false, true], "too many for any time");
    }

    #[test]
    fn nothing_is_counted_that_was_sent() {
        let (near, far) = Channel::pair().unwrap();
        let mut connection = Connection::new(near);
        for _ in 0..3 * MAX_QUEUED_MESSAGES {
            connection.send(&Notice::Left, Vec::new());
            far.receive(Duration::ZERO).unwrap();
        }
        assert!(!connection.is_broken() && !connection.has_queued());
        assert_eq!((connection.bytes, connection.files), (0, 0));
    }
}
