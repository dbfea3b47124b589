import pytest

from peers import Notifications, Peer, start_agent


@pytest.fixture
def start_peer():
    """Starts agents in processes of their own, which end with the test."""
    peers = []

    def start(*arguments, **config):
        peers.append(Peer(*arguments, **config))
        return peers[-1]

    yield start
    failures = []
    for peer in peers:
        try:
            peer.end()
        except Exception as error:
            peer.kill()
            failures.append(f"{peer.name}: {error!r}")
    assert not failures


# Of agents in two processes: the defaults, and providers that could reach another machine, or this one.
BETWEEN_PROCESSES = {
    "default": {},
    "tcp": {"fabric": "=tcp", "source": "127.0.0.1", "policy": "=fabric-direct"},
    "shm": {"fabric": "=shm", "policy": "=fabric-direct"},
}


@pytest.fixture(scope="module", params=BETWEEN_PROCESSES)
def two_processes(request):
    """An agent here and one in another process."""
    parameters = BETWEEN_PROCESSES[request.param]
    here, there = start_agent("here", parameters), Peer("there", parameters)
    here.add_remote_agent(there.call("metadata"))
    there.call("add", here.get_agent_metadata())
    yield here, there, Notifications(here)
    here.remove_remote_agent("there")
    there.end()


@pytest.fixture
def two_agents():
    """Two agents of this process that know each other."""
    first, second = start_agent("first"), start_agent("second")
    first.add_remote_agent(second.get_agent_metadata())
    second.add_remote_agent(first.get_agent_metadata())
    return first, second
