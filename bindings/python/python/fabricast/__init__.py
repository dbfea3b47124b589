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

from fabricast import errors
from fabricast._native import (
    Agent,
    AgentEvent,
    Array,
    Loan,
    Node,
    Operation,
    Publisher,
    Region,
    Route,
    Sample,
    Sent,
    Strided,
    Subscriber,
    Topic,
    __version__,
    allocate,
    card_info,
)
from fabricast.errors import Error

__all__ = [
    "Agent",
    "AgentEvent",
    "Array",
    "Error",
    "Loan",
    "Node",
    "Operation",
    "Publisher",
    "Region",
    "Route",
    "Sample",
    "Sent",
    "Strided",
    "Subscriber",
    "Topic",
    "__version__",
    "allocate",
    "card_info",
    "errors",
    "report",
]


def report(node: Node) -> list[dict]:
    """Topics, publishers, subscribers and peers of the node, each a dictionary.

    The keys are those of `fabricast topics --json`.
    """
    return _json.loads(node._report())
