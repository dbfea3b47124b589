"""Messages for asyncio."""

import asyncio
import os
from collections.abc import Callable
from typing import Any, Self, TypeVar

from fabricast import errors
from fabricast._native import Loan, Publisher, Sample, Sent, Subscriber

_Result = TypeVar("_Result")

# After this time a waiting task notices that the subscriber was closed.
_PAUSE = 0.2
# Between two looks for room, from the first to the longest.
_FIRST_LOOK, _LONGEST_LOOK = 0.0002, 0.01


class Samples:
    """Asynchronous iterator of the samples of a subscriber: until it is closed or, with until_end, until the last
    publisher has gone."""

    def __init__(self, subscriber: Subscriber, until_end: bool) -> None:
        self._subscriber = subscriber
        self._until_end = until_end

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sample:
        try:
            return await pull(self._subscriber, None, self._until_end)
        except (errors.Closed, errors.NoPublishers):
            raise StopAsyncIteration from None


async def pull(subscriber: Subscriber, timeout: float | None, until_end: bool) -> Sample:
    """The next message of a subscriber."""
    loop = asyncio.get_running_loop()
    end = None if timeout is None else loop.time() + timeout
    while True:
        sample = subscriber.try_pull(until_end=until_end)
        if sample is not None:
            return sample
        left = _PAUSE if end is None else min(_PAUSE, end - loop.time())
        if left <= 0:
            cause = f'topic "{subscriber.topic}" has no message within {timeout} s'
            raise errors.DeadlineExceeded(f"pull from topic failed: {cause}", "pull from topic")
        descriptor = subscriber.fileno()
        # Once it has been made readable, the next message may be there already.
        sample = subscriber.try_pull(until_end=until_end)
        if sample is not None:
            return sample
        readable: asyncio.Future[None] = loop.create_future()
        # A descriptor of this task: an event loop has one callback for each, and the subscriber may be closed meanwhile.
        own = os.dup(descriptor)
        loop.add_reader(own, _finish, readable)
        try:
            await asyncio.wait({readable}, timeout=left)
        finally:
            loop.remove_reader(own)
            os.close(own)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _with_room(call: Callable[[], _Result], timeout: float | None) -> _Result:
    """Makes a call again until there is room for a message."""
    loop = asyncio.get_running_loop()
    end = None if timeout is None else loop.time() + timeout
    pause = _FIRST_LOOK
    while True:
        try:
            return call()
        except errors.WouldBlock as error:
            left = pause if end is None else end - loop.time()
            if left <= 0:
                text = f"{error}, within {timeout} s"
                raise errors.DeadlineExceeded(text, error.operation) from None
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_LOOK)


async def publish(publisher: Publisher, array: Any, metadata: bytes, timeout: float | None) -> Sent:
    loop = asyncio.get_running_loop()
    end = None if timeout is None else loop.time() + timeout
    # The copy is made once.
    copied = await _with_room(lambda: publisher._loan_copy(array), timeout)
    publisher._count_task_loan(True)
    try:
        return await publish_loan(copied, metadata, None if end is None else max(0, end - loop.time()))
    finally:
        publisher._count_task_loan(False)


async def loan(publisher: Publisher, shape: Any, dtype: Any, timeout: float | None) -> Loan:
    return await _with_room(lambda: publisher.loan(shape, dtype, timeout=0), timeout)


async def publish_loan(loan: Loan, metadata: bytes, timeout: float | None) -> Sent:
    loop = asyncio.get_running_loop()
    end = None if timeout is None else loop.time() + timeout
    # So is that of a loan with views.
    copied = await _with_room(lambda: loan._copy_if_viewed(), timeout)
    left = None if end is None else max(0, end - loop.time())
    sent = await _with_room(lambda: (copied or loan).publish(metadata=metadata, timeout=0), left)
    if copied is not None:
        loan.discard()
    return sent
