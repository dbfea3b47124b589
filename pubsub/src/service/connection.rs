//! A connection that never blocks the service: messages that cannot be sent now are queued.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, Participant};

use super::protocol::{self, Notice};

/// Queued messages for a client that does not receive.
const MAX_QUEUED_MESSAGES: usize = 4096;
/// Bytes of queued messages: more than any report has.
const MAX_QUEUED_BYTES: usize = 16 << 20;
/// Queued descriptors: the pidfds of all participants, and as many more.
const MAX_QUEUED_DESCRIPTORS: usize = 2 * Participant::SLOTS as usize;

/// Queued descriptors of all clients together: a process has 1024 by default.
const MAX_QUEUED_DESCRIPTORS_TOTAL: usize = 2 * Participant::SLOTS as usize;
/// Queued descriptors of clients that have received nothing for a while. A joining client gets all
/// pidfds at once, and receives them.
const MAX_QUEUED_DESCRIPTORS_STALLED: usize = Participant::SLOTS as usize / 4;
const STALL_TIMEOUT: Duration = Duration::from_secs(2);

/// Sent descriptors that a client has not received. The system counts those of all processes of a
/// user together, also those sent to a stopped process: beyond the limit no process could send any
/// more.
const MAX_DESCRIPTORS_IN_FLIGHT: usize = 128;

#[derive(Debug)]
pub(super) struct Connection {
    channel: Channel,
    queued: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    bytes: usize,
    files: usize,
    /// When a message was last sent, or the first one queued.
    last_progress: Instant,
    /// Descriptors sent since the client had received all of them.
    descriptors_in_flight: usize,
    /// The queue waits until clients have received descriptors, which no event reports.
    is_stalled: bool,
    is_broken: bool,
}

impl Connection {
    pub(super) fn new(channel: Channel) -> Self {
        Self {
            channel,
            queued: VecDeque::new(),
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

    /// Sends now or later, in order.
    pub(super) fn send(&mut self, notice: &Notice, descriptors: Vec<OwnedFd>) {
        if self.is_broken {
            return;
        }
        let bytes = protocol::encode(notice);
        if self.queued.is_empty() {
            self.last_progress = Instant::now();
        }
        self.bytes += bytes.len();
        self.files += descriptors.len();
        self.queued.push_back((bytes, descriptors));
        self.flush();
        let is_too_much = self.queued.len() > MAX_QUEUED_MESSAGES
            || self.bytes > MAX_QUEUED_BYTES
            || self.files > MAX_QUEUED_DESCRIPTORS;
        if is_too_much {
            self.mark_broken();
        }
    }

    /// Sends queued messages, as far as there is room. True if one was sent.
    pub(super) fn flush(&mut self) -> bool {
        let waited = self.queued.len();
        self.send_waiting();
        self.queued.len() < waited
    }

    fn send_waiting(&mut self) {
        self.is_stalled = false;
        while let Some((bytes, descriptors)) = self.queued.front() {
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
                    self.queued.pop_front();
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

    /// The client has lost a message, so it has to rejoin, which restores its state.
    pub(super) fn mark_broken(&mut self) {
        (self.is_broken, self.is_stalled) = (true, false);
        self.queued.clear();
        (self.bytes, self.files) = (0, 0);
    }

    /// Ends the connection for both sides, even if a child of either holds a duplicate.
    pub(super) fn end(&mut self) {
        self.flush();
        self.channel.end();
    }

    /// Returns true if queued messages can be sent as soon as there is room.
    pub(super) fn has_queued(&self) -> bool {
        !self.queued.is_empty() && !self.is_stalled
    }

    /// Returns true if queued messages have to be tried again later, without an event.
    pub(super) fn is_stalled(&self) -> bool {
        self.is_stalled
    }

    /// Returns true if the queue has to be checked without an event.
    pub(super) fn must_poll(&self) -> bool {
        self.is_stalled || self.files > 0
    }

    /// Returns true if the client has exited, or its queue has overflowed.
    pub(super) fn is_broken(&self) -> bool {
        self.is_broken
    }
}

/// Drops connections while too many descriptors are queued together, so that the service does not
/// run out of them. The longest queues go first.
pub(super) fn drop_stalled<'a>(
    now: Instant,
    connections: impl Iterator<Item = &'a mut Connection>,
) {
    let mut waited: Vec<_> = connections.filter(|it| it.files > 0).collect();
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

    /// Queue sizes of a client that does not receive, just before it is dropped.
    fn send_until_broken(notice: &Notice, files: usize) -> (usize, usize, usize) {
        let (near, _far) = Channel::pair().unwrap();
        let mut connection = Connection::new(near);
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let copies = || (0..files).map(|_| null.try_clone().unwrap()).collect();
        let mut most = (0, 0, 0);
        while !connection.is_broken() {
            let Connection { bytes, files, .. } = connection;
            most = most.max((connection.queued.len(), bytes, files));
            connection.send(notice, copies());
        }
        assert!(!connection.has_queued());
        most
    }

    #[test]
    fn queue_of_a_silent_client_is_bounded() {
        let left = Notice::Left;
        let (messages, ..) = send_until_broken(&left, 0);
        assert_eq!(messages, MAX_QUEUED_MESSAGES);
        let pidfds = Notice::Pidfds { participants: vec![1; 32] };
        let (_, _, files) = send_until_broken(&pidfds, 32);
        assert!((Participant::SLOTS as usize..=MAX_QUEUED_DESCRIPTORS).contains(&files), "{files}");
        let row = crate::Row::Subscriber {
            topic: "x".repeat(200),
            participant: "y".repeat(200).into(),
            unread: 0,
            held: 0,
            is_evicted: false,
            missed: 0,
        };
        let rows = Notice::Rows { request: 1, rows: vec![row; 64], is_last: false };
        let (messages, bytes, _) = send_until_broken(&rows, 0);
        assert!(
            messages < MAX_QUEUED_MESSAGES && bytes <= MAX_QUEUED_BYTES,
            "{messages} of {bytes}"
        );
    }

    /// Receives all messages, as one participant number each.
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
    fn silent_client_has_few_descriptors_in_flight() {
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
    fn silent_clients_do_not_exhaust_descriptors_together() {
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        // A client with this number of queued descriptors.
        let client = |files: usize| {
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
            |files: [usize; 3]| -> (Vec<_>, Vec<_>) { files.map(client).into_iter().unzip() };
        let broken = |all: &[Connection]| all.iter().map(Connection::is_broken).collect::<Vec<_>>();
        let (mut all, fars) = all_of([20, 200, 100]);
        let now = Instant::now();
        drop_stalled(now, all.iter_mut());
        assert_eq!(broken(&all), [false; 3], "before the timeout");
        // One of them has received messages.
        all[2].last_progress = now + STALL_TIMEOUT;
        drop_stalled(now + STALL_TIMEOUT, all.iter_mut());
        assert_eq!(broken(&all), [false, true, false]);
        assert!(!all[1].must_poll());
        drop((all, fars));
        let (mut all, _fars) = all_of([200, 20, 300]);
        drop_stalled(Instant::now(), all.iter_mut());
        assert_eq!(broken(&all), [false, false, true], "too many even before the timeout");
    }

    #[test]
    fn sent_messages_are_not_counted() {
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
