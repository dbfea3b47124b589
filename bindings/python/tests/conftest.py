import itertools

import fabricast
import pytest

_names = (f"topic-{number}" for number in itertools.count())


@pytest.fixture
def node(tmp_path):
    with fabricast.Node(tmp_path) as node:
        yield node


@pytest.fixture
def name():
    return next(_names)


@pytest.fixture
def exchange(node, name):
    """Publishes an array, and returns the sample."""
    with node.topic(name).publisher() as publisher, node.open(name).subscriber() as subscriber:

        def run(array, **options):
            sent = publisher.publish(array, **options)
            assert sent.subscribers == 1 and not sent.is_dropped
            return subscriber.pull(timeout=10)

        yield run
