"""Agents: put, get, notices."""

import gc
import signal
import subprocess
import sys
import time
import weakref

import fabricast
import pytest
from fabricast import errors

DEADLINE = 30


def notice(agent):
    """The next notice; others may join and leave."""
    while True:
        event = agent.next_event(timeout=DEADLINE)
        assert event is not None
        if event.kind == "notice":
            return event


@pytest.fixture
def pair():
    with fabricast.Agent("here") as here, fabricast.Agent("there") as there:
        yield here, there


def test_put_and_get_with_notices(pair):
    here, there = pair
    target = fabricast.allocate((4, 4), "int32")
    memoryview(target).cast("B")[:] = bytes(64)
    region = there.register(target, read=True, write=True)
    there.publish("target", region)
    source = fabricast.allocate((4, 4), "int32")
    memoryview(source).cast("B")[:] = bytes(range(64))
    local = here.register(source)
    peer = here.connect(there.card)
    route = here.route_to(peer, "target", local)
    assert route.path == "same-process" and route.fallback is None and "taken" in route.explain()
    assert here.put(route, [(0, 32, 16), (48, 0, 16)], notice=(7, b"two blocks")).wait() == 32
    event = notice(there)
    assert (event.tag, event.data, event.agent) == (7, b"two blocks", here.identity)
    expected = bytes(range(32, 48)) + bytes(32) + bytes(range(16))
    assert target.tobytes() == expected
    get = here.get(route)
    assert get.wait() == 64 and source.tobytes() == expected
    # A column goes to the row below.
    column = fabricast.Strided.tile(4, (4, 1), (4, 4), (0, 0), (4, 4), (0, 3))
    assert column.nbytes == 16
    assert here.put(route, column).wait() == 16
    here.fence(peer)
    here.notify(peer, 9, ordered=True).wait()
    assert notice(there).tag == 9
    here.flush(peer)
    assert memoryview(target).tolist()[0][3] == memoryview(source).tolist()[0][0]


def test_regions_of_numpy_arrays(pair):
    numpy = pytest.importorskip("numpy")
    here, there = pair
    target, source = numpy.zeros(1000), numpy.arange(1000.0)
    there.publish("target", there.register(target, write=True))  # the card does not keep it
    kept = there.register(target, write=True)
    there.publish("target", kept)
    peer = here.connect(there.card)
    route = here.route_to(peer, "target", here.register(source))
    here.put(route).wait()
    assert (target == source).all()
    for refused, words in [(b"bytes", "read-only"), (source[::2], "gaps"), (numpy.zeros(0), "empty")]:
        with pytest.raises(ValueError, match=words):
            here.register(refused)


def test_arrays_stay_as_long_as_regions(pair):
    numpy = pytest.importorskip("numpy")

    class Array(numpy.ndarray):
        pass

    here, _ = pair
    array = numpy.zeros(100).view(Array)
    weak = weakref.ref(array)
    region = here.register(array)
    del array
    gc.collect()
    assert weak() is not None
    region.close()
    end = time.monotonic() + DEADLINE
    while weak() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert weak() is None


def test_emulated_devices(pair):
    here, there = pair
    target = fabricast.allocate((1 << 16,), "uint8", device="emulated:1")
    assert target.device == "emulated:1" and target.tobytes() == bytes(1 << 16)
    region = there.register(target, read=True, write=True)
    source = fabricast.allocate((1 << 16,), "uint8", device="emulated:1")
    memoryview(source)[:] = b"\x05" * (1 << 16)
    route = here.join(here.connect(there.card), region.descriptor, here.register(source))
    here.put(route).wait()
    assert target.tobytes() == b"\x05" * (1 << 16)


def test_errors_have_kinds(pair):
    here, there = pair
    memory = fabricast.allocate((64,), "uint8")
    read_only = there.register(memory, read=True)
    there.publish("read-only", read_only)
    local = here.register(fabricast.allocate((64,), "uint8"))
    peer = here.connect(there.card)
    with pytest.raises(errors.Unknown, match="read-only"):
        here.route_to(peer, "absent", local)
    route = here.route_to(peer, "read-only", local)
    with pytest.raises(errors.NotAllowed):
        here.put(route)
    with pytest.raises(IndexError):
        here.get(route, [(60, 0, 8)])
    with pytest.raises(errors.NoPath, match="cuda-ipc"):
        here.join(peer, read_only.descriptor, local, policy="=cuda-ipc")
    with pytest.raises(errors.Malformed):
        here.connect(b"no card")
    with pytest.raises(errors.Error, match="4096"):
        here.notify(peer, 1, bytes(4097))
    there.withdraw(read_only)
    with pytest.raises(errors.Error):
        here.get(route).wait()
    with pytest.raises(errors.NoDevice):
        fabricast.allocate((1,), "uint8", device="emulated:99")
    with pytest.raises(errors.Error, match="empty"):
        here.register(fabricast.allocate((0,), "uint8"))
    there.close()
    with pytest.raises(errors.Closed, match="agent was closed"):
        there.card


PEER = """
import sys, fabricast
agent = fabricast.Agent("peer", directory=sys.argv[1])
field = fabricast.allocate((1 << 20,), "float64")
region = agent.register(field, read=True, write=True)
agent.publish("field", region)
sys.stdout.buffer.write(agent.card.hex().encode() + b"\\n")
sys.stdout.flush()
while True:
    event = agent.next_event(timeout=None)
    if event.kind == "left":
        break
    if event.kind == "notice":
        print(event.tag, event.data.decode(), sum(memoryview(field)[:1000]), flush=True)
agent.close()
print("left", flush=True)
"""


def start(program, *arguments):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_put_into_each_other(tmp_path):
    process = start(PEER, tmp_path)
    card = bytes.fromhex(process.stdout.readline())
    assert fabricast.card_info(card)[1] == "peer"
    with fabricast.Agent("here", directory=tmp_path) as agent:
        source = fabricast.allocate((1 << 20,), "float64")
        values = memoryview(source)
        for number in range(1000):
            values[number] = number
        peer = agent.connect(card)
        route = agent.route_to(peer, "field", agent.register(source))
        assert route.path == "shared-memory"
        assert agent.put(route, notice=(3, b"sum")).wait() == 8 << 20
        assert process.stdout.readline() == "3 sum 499500.0\n"
        agent.disconnect(peer)
    assert process.communicate(timeout=DEADLINE)[0] == "left\n" and process.returncode == 0


def test_killed_peers_are_reported(tmp_path):
    process = start(PEER, tmp_path)
    card = bytes.fromhex(process.stdout.readline())
    with fabricast.Agent("here", directory=tmp_path) as agent:
        region = agent.register(fabricast.allocate((1 << 20,), "float64"))
        route = agent.route_to(agent.connect(card), "field", region)
        process.kill()
        process.wait()
        with pytest.raises(errors.Error):
            for _ in range(1000):
                agent.put(route).wait()
                time.sleep(0.01)
        with pytest.raises(errors.Error, match="ended|gone|closed"):
            agent.connect(card)


WAITING = """
import sys, fabricast
agent = fabricast.Agent("waiting")
print("ready", flush=True)
try:
    agent.next_event(timeout=None)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_control_c_ends_the_wait_for_an_event():
    process = start(WAITING)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=DEADLINE)[0] == "interrupted\n"


def test_outcome_of_an_operation_is_known_after_it_was_returned(tmp_path):
    with fabricast.Agent("one", directory=tmp_path) as one, fabricast.Agent("two", directory=tmp_path) as two:
        inbox, outbox = fabricast.allocate((4096,), "uint8"), fabricast.allocate((4096,), "uint8")
        region = two.register(inbox, write=True)
        route = one.join(one.connect(two.card), region.descriptor, one.register(outbox))
        operation = one.put(route)
        while not operation.done():
            pass
        assert (operation.wait(), operation.wait(), operation.done()) == (4096, 4096, True)


ENDS_WITH_KEPT_ARRAYS = """
import atexit
import fabricast, numpy

# Arrays that regions kept are dropped while the interpreter ends, when no thread may attach to it.
atexit._clear()
agent = fabricast.Agent("ends")
region = agent.register(numpy.zeros(4096, "uint8"))

class Late:
    def __del__(self):
        for _ in range(1000):
            pass

late = Late()
atexit.register(agent.close)
atexit.register(region.close)
del region
"""


def test_arrays_that_regions_kept_do_not_abort_the_end_of_a_process():
    command = [sys.executable, "-c", ENDS_WITH_KEPT_ARRAYS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
