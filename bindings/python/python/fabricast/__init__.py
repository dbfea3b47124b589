"""GPU and host memory between processes and machines over whatever fabric is there.

Processes of a node share messages of topics, each of which is stored once:

>>> import array, tempfile
>>> import fabricast
>>> directory = tempfile.TemporaryDirectory()
>>> with fabricast.Node(directory.name) as node:
...     topic = node.topic("numbers", dtype="int32", shape=(3,))
...     with topic.subscriber() as subscriber, topic.publisher() as publisher:
...         sent = publisher.publish(array.array("i", [1, 2, 3]))
...         with subscriber.pull() as sample:
...             memoryview(sample.array).tolist()
[1, 2, 3]
>>> directory.cleanup()
"""

import json as _json
from typing import Any as _Any

from fabricast import _exit, errors, events
from fabricast._native import (
    Agent,
    AgentEvent,
    Array,
    Loan,
    Node,
    Operation,
    PreparedTransfer,
    Publisher,
    Region,
    Route,
    Sample,
    Sent,
    Shared,
    Strided,
    Subscriber,
    Topic,
    TopicPublisher,
    __version__,
    _info,
    _paths,
    allocate,
    card_info,
)
from fabricast._log import forward_log
from fabricast._operators import add_operators as _add_operators
from fabricast._sharing import open as open
from fabricast._sharing import share
from fabricast._wait import wait
from fabricast.errors import Error

_add_operators()
_exit.wait_for_receivers()

# Without "open": `from fabricast import *` leaves that of Python.
__all__ = [
    "Agent",
    "AgentEvent",
    "Array",
    "Error",
    "Loan",
    "Node",
    "Operation",
    "PreparedTransfer",
    "Publisher",
    "Region",
    "Route",
    "Sample",
    "Sent",
    "Shared",
    "Strided",
    "Subscriber",
    "Topic",
    "TopicPublisher",
    "__version__",
    "allocate",
    "card_info",
    "errors",
    "events",
    "forward_log",
    "info",
    "paths",
    "report",
    "share",
    "wait",
]


def info() -> dict[str, _Any]:
    """Devices and providers of this machine, and why others are missing. Opens the devices.

    >>> import fabricast
    >>> [device["name"] for device in fabricast.info()["devices"] if device["name"] == "emulated:0"]
    ['emulated:0']
    """
    found: dict[str, _Any] = _json.loads(_info())
    return found


def paths(policy: str = "") -> list[dict[str, _Any]]:
    """The path of each typical situation, with the reasons against the others.

    >>> import fabricast
    >>> fabricast.paths()[1]["path"]
    'cuda-ipc'
    """
    found: list[dict[str, _Any]] = _json.loads(_paths(policy))
    return found


def report(node: Node) -> list[dict[str, _Any]]:
    """Topics, publishers, subscribers and peers of the node, each a dictionary.

    The keys are those of `fabricast topics --json`.
    """
    found: list[dict[str, _Any]] = _json.loads(node._report())
    return found
