"""The end of a child of multiprocessing that has sent arrays: it waits until they were received."""

import multiprocessing
import multiprocessing.util
import sys
import time

from fabricast import _native

# Seconds after which arrays that were not received are given up.
_TIMEOUT = 30.0
# Between two looks at the parent.
_PAUSE = 0.1
# Lower than the priority with which multiprocessing empties its queues.
_PRIORITY = -10


def _wait() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    end = time.monotonic() + _TIMEOUT
    # A parent that has ended receives nothing.
    while parent.is_alive() and not _native._wait_for_receivers(_PAUSE):
        if time.monotonic() >= end:
            import logging

            text = "arrays that this process sent were not received within %g s, and are lost"
            logging.getLogger("fabricast").warning(text, _TIMEOUT)
            return


def _register(_module: object = None) -> None:
    multiprocessing.util.Finalize(None, _wait, exitpriority=_PRIORITY)


def wait_for_receivers() -> None:
    """Lets the end of children of multiprocessing wait: this process, if it is one, and those that it forks. The call comes
    before any array is sent: the thread of a queue may send it when the process ends already."""
    # A forked child has no finalizers of its parent; a spawned one imports the program before it knows its parent.
    multiprocessing.util.register_after_fork(sys.modules[__name__], _register)
    _register()
