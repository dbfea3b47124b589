import itertools
import os

import fabricast
import pytest

# MPICH's launcher listens at ports of this process, outside those of the system: a peer of another test that connects
# once more to a port that it knew would end the job.
_port = 10_000 + os.getpid() % 999 * 10
os.environ["MPIEXEC_PORT_RANGE"] = f"{_port}:{_port + 9}"

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
