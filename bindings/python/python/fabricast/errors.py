"""Exceptions of the library.

Each has the text ``<operation> <object> failed: <cause>. <remedy>``, the attribute ``operation``, and ``ranks``:
the ranks of a group or domain that caused it, if they are known.
Where Python has an exception for the same, a class is one of that kind, too: a missed deadline is a
``TimeoutError``, an invalid argument a ``ValueError``.
"""


class Error(Exception):
    """Base of all exceptions of the library."""

    operation: str
    ranks: tuple[int, ...]

    def __init__(self, text: str = "", operation: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.operation = operation
        self.ranks = ranks

    def __reduce__(self) -> tuple[type["Error"], tuple[str, str, tuple[int, ...]]]:
        return type(self), (str(self), self.operation, self.ranks)


class InvalidArgument(Error, ValueError):
    """An argument that can never be valid."""


class SettingsDiffer(Error):
    """The topic exists with other settings; the text has both."""


class NotFound(Error, LookupError):
    """There is no such topic, node or publisher."""


class NoDevice(Error):
    """There is no such device, or this process does not see it."""


class OverBudget(Error, MemoryError):
    """The budget of the node does not allow it; the text has the figures."""


class TooLong(Error, ValueError):
    """The message is longer than the topic's largest."""


class TooMany(Error):
    """A limit is reached; the text names it."""


class TooManyLoans(TooMany):
    """The publisher has as many loans as its topic allows."""


class TooManySamples(TooMany):
    """The subscriber holds as many samples as a topic that drops messages allows."""


class DeadlineExceeded(Error, TimeoutError):
    """The deadline passed; the text names what was waited for."""


class NotFoundInTime(NotFound, DeadlineExceeded):
    """There was no such topic, or no memory shared under the name, until the timeout."""


class WouldBlock(DeadlineExceeded, BlockingIOError):
    """There was no message, or no room, and ``timeout=0`` did not wait."""


class Evicted(Error):
    """A subscriber was evicted: it blocked publishers for longer than the topic allows.

    Its samples stay valid. Open another subscriber to continue.
    """


class Denied(Error, PermissionError):
    """This process may not use the node, or does not trust its service."""


class AlreadyServed(Error):
    """Another process serves the node, and keeps doing so."""


class Malformed(Error):
    """Bytes from outside that are truncated, altered or inconsistent."""


class VersionMismatch(Error):
    """The other side uses another version of the protocol."""


class Closed(Error):
    """The node, or an object of it, was closed or lost."""


class NoPublishers(Error):
    """The last publisher has left or died, all messages were pulled, and the caller asked for the end."""


class Poisoned(Error):
    """The message will never be complete: its publisher died, or its device failed."""


class Forked(Error):
    """The object was made before a fork, and belongs to the parent process."""


class NoProvider(Error):
    """No provider reaches other nodes, or not the requested one; the text has the reason."""


class CannotListen(Error, OSError):
    """The node cannot listen at its address."""


class Failed(Error):
    """A lower layer failed; the text has its error."""


class NoPath(Error):
    """No path carries the bytes; the text has the reason for each."""


class NotAllowed(Error, PermissionError):
    """The rights of the region do not allow it."""


class OutOfBounds(Error, IndexError):
    """A block is beyond the end of its region."""


class Stale(Error):
    """The region was withdrawn, or belongs to another agent, or to an earlier start of it."""


class Unknown(Error, LookupError):
    """There is no such peer, region or operation."""


class Cancelled(Error):
    """The operation was cancelled."""


class NoPeerAccess(Error):
    """A device cannot access the memory of another one directly."""


class NotSupported(Error):
    """The device, or its driver, cannot do it; the text has the remedy."""


class RankFailed(Error):
    """A rank of the job has ended, or could not start; the text names it."""


class Mismatch(Error):
    """Ranks called different operations, or with different arguments; the text has both."""


class Unavailable(Error):
    """There is no launcher, driver or address; the text has the reason."""


class WrongMemory(Error):
    """The memory is not the one that was described."""


class CopyWarning(UserWarning):
    """A loan was copied, since views of its array exist that could write to the published message."""


class OutOfMemory(Error, MemoryError):
    """The device, or the host, has not enough memory."""


class DeviceFailed(Error):
    """The device failed, and its context is lost."""


# The name that devices use.
NoSuchDevice = NoDevice
