"""Waits for several subscribers."""

import select
import time
from collections.abc import Sequence

from fabricast._native import Subscriber

# After this time a subscriber that was closed meanwhile is noticed.
_PAUSE = 0.2


def wait(subscribers: Sequence[Subscriber], timeout: float | None = 30.0) -> list[Subscriber]:
    """Waits until one of several subscribers has a message, or another reason to look: an event, an eviction, the end of
    publishers. Returns those that have, in their order; none after the timeout.

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
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        poll = select.poll()
        by_descriptor: dict[int, list[int]] = {}
        for index, subscriber in enumerate(subscribers):
            # Raises Closed for one that was closed.
            descriptor = subscriber.fileno()
            by_descriptor.setdefault(descriptor, []).append(index)
            poll.register(descriptor, select.POLLIN)
        left = _PAUSE if end is None else min(_PAUSE, end - time.monotonic())
        found = poll.poll(max(0, left) * 1000)
        ready = sorted(index for descriptor, _ in found for index in by_descriptor[descriptor])
        if ready or (end is not None and time.monotonic() >= end):
            return [subscribers[index] for index in ready]
