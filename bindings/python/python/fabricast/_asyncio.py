"""Messages for asyncio."""

import asyncio

from fabricast import errors


class Samples:
    """Asynchronous iterator of the samples of a subscriber."""

    def __init__(self, subscriber):
        self._subscriber = subscriber

    def __aiter__(self):
        return self

    async def __anext__(self):
        while True:
            try:
                sample = self._subscriber.try_pull()
                if sample is not None:
                    return sample
                descriptor = self._subscriber.fileno()
            except errors.Closed:
                raise StopAsyncIteration from None
            # Once it has been made readable, the next message may be there already.
            sample = self._subscriber.try_pull()
            if sample is not None:
                return sample
            loop = asyncio.get_running_loop()
            readable = loop.create_future()
            loop.add_reader(descriptor, _finish, readable)
            try:
                await readable
            finally:
                loop.remove_reader(descriptor)


def _finish(future):
    if not future.done():
        future.set_result(None)
