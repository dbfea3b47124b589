"""Messages for asyncio."""

import asyncio
import os

from fabricast import errors

# After this time a waiting task notices that the subscriber was closed.
_PAUSE = 0.2


class Samples:
    """Asynchronous iterator of the samples of a subscriber: until it is closed or, with until_end, until the last
    publisher has gone."""

    def __init__(self, subscriber, until_end):
        self._subscriber = subscriber
        self._until_end = until_end

    def __aiter__(self):
        return self

    async def __anext__(self):
        while True:
            try:
                sample = self._subscriber.try_pull(until_end=self._until_end)
                if sample is not None:
                    return sample
                descriptor = self._subscriber.fileno()
                # Once it has been made readable, the next message may be there already.
                sample = self._subscriber.try_pull(until_end=self._until_end)
                if sample is not None:
                    return sample
            except (errors.Closed, errors.NoPublishers):
                raise StopAsyncIteration from None
            loop = asyncio.get_running_loop()
            readable = loop.create_future()
            # A descriptor of this task: an event loop has one callback for each, and the subscriber may
            # be closed meanwhile.
            own = os.dup(descriptor)
            loop.add_reader(own, _finish, readable)
            try:
                await asyncio.wait({readable}, timeout=_PAUSE)
            finally:
                loop.remove_reader(own)
                os.close(own)


def _finish(future):
    if not future.done():
        future.set_result(None)
