"""What `poll_event` of publishers and subscribers returns: a dictionary, whose "event" says which keys it has.

>>> import tempfile
>>> import fabricast
>>> directory = tempfile.TemporaryDirectory()
>>> with fabricast.Node(directory.name) as node:
...     topic = node.topic("frames")
...     publisher = topic.publisher()
...     with topic.subscriber():
...         sent = publisher.publish(b"frame")
...     publisher.wait_for_no_subscribers()
...     publisher.poll_event()
{'event': 'no-subscribers'}
>>> directory.cleanup()
"""

from typing import Literal, TypeAlias, TypedDict

__all__ = ["Evicted", "Gap", "NoPublishers", "NoSubscribers", "PublisherLost", "RemotePublisherLost", "SubscriberEvent"]


class NoSubscribers(TypedDict):
    """Of a publisher: the last subscriber has left or died, on this node and on others."""

    event: Literal["no-subscribers"]


class Gap(TypedDict):
    """Of a subscriber: it missed this many messages."""

    event: Literal["gap"]
    missed: int


class PublisherLost(TypedDict):
    """Of a subscriber: a publisher of this node died. The number is that of its samples."""

    event: Literal["publisher-lost"]
    publisher: int


class RemotePublisherLost(TypedDict):
    """Of a subscriber: a publisher of another node was lost. The node is the `origin` of its samples."""

    event: Literal["remote-publisher-lost"]
    node: bytes
    publisher: int


class NoPublishers(TypedDict):
    """Of a subscriber: the last publisher has left or died, on this node and on others."""

    event: Literal["no-publishers"]


class Evicted(TypedDict):
    """Of a subscriber: it blocked publishers for this many seconds, longer than the topic allows; None if the time is
    not known."""

    event: Literal["evicted"]
    held_for: float | None


SubscriberEvent: TypeAlias = Gap | PublisherLost | RemotePublisherLost | NoPublishers | Evicted
