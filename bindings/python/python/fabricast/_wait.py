"""Waits for several subscribers."""

import select
import time
from collections.abc import Iterable

from fabricast._native import Subscriber
from fabricast.errors import InvalidArgument

# After this time a subscriber that was closed meanwhile is noticed.
_PAUSE = 0.2


def check_timeout(operation: str, timeout: float | None) -> None:
    """Refuses what no wait can take."""
    if timeout is not None and not timeout >= 0:
        cause = f"timeout={timeout}: at least 0 seconds, or None for no timeout"
        raise InvalidArgument(f"{operation} failed: {cause}", operation)


def wait(subscribers: Iterable[Subscriber], timeout: float | None = 30.0) -> list[Subscriber]:
    """Waits until one of several subscribers has a message, or another reason to look: an event, an eviction. Returns those
    that have, in their order; none after the timeout. Use `try_pull`: an event is no message.

    >>> import tempfile
    >>> import fabricast
    >>> directory = tempfile.TemporaryDirectory()
    >>> with fabricast.Node(directory.name) as node:
    ...     left, right = node.topic("left"), node.topic("right")
    ...     subscribers = [left.subscriber(), right.subscriber()]
    ...     sent = right.publisher().publish(b"message")
    ...     [ready.topic for ready in fabricast.wait(subscribers, timeout=10)]
    ['right']
    >>> directory.cleanup()
    """
    check_timeout("wait for subscribers", timeout)
    if isinstance(subscribers, Subscriber):
        raise TypeError("wait for subscribers failed: a list of subscribers is needed, not one of them: [subscriber]")
    subscribers = list(subscribers)
    for index, it in enumerate(subscribers):
        if not isinstance(it, Subscriber):
            raise TypeError(f"wait for subscribers failed: {type(it).__name__}, at index {index}, is no subscriber")
    end = None if timeout is None else time.monotonic() + timeout
    poll = select.poll()
    for subscriber in subscribers:
        poll.register(subscriber.fileno(), select.POLLIN)
    while True:
        # Raises Closed for one that was closed.
        ready = [subscriber for subscriber in subscribers if subscriber._is_ready()]
        left = _PAUSE if end is None else min(_PAUSE, end - time.monotonic())
        if ready or left <= 0:
            return ready
        poll.poll(left * 1000)
