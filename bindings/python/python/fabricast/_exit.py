"""The end of a process that has sent arrays: it waits until they were received."""

import multiprocessing.util
import sys

from fabricast import _native

# Seconds until what nobody receives is given up.
_TIMEOUT = 30.0
# After that with which multiprocessing writes what its queues still have.
_PRIORITY = -10


def _wait() -> None:
    if not _native._wait_for_receivers(_TIMEOUT):
        import logging

        logging.getLogger("fabricast").warning(
            "arrays that this process sent were not received within %g s, and are lost", _TIMEOUT
        )


def _register(_module: object = None) -> None:
    multiprocessing.util.Finalize(None, _wait, exitpriority=_PRIORITY)


def wait_for_receivers() -> None:
    """Lets the end of this process wait. It is said before an array is sent: the thread of a queue may send it when the
    process ends already."""
    # Children of multiprocessing that were forked have no finalizers of their parents.
    multiprocessing.util.register_after_fork(sys.modules[__name__], _register)
    _register()
