"""Requests as inference engines make them: prepared transfers, several regions, streams, cancellation."""

import array
import subprocess
import sys
from types import SimpleNamespace

import fabricast
import pytest
from fabricast import errors

numpy = pytest.importorskip("numpy")

PAGE = 4096
PAGES = 16
ALL = [(number * PAGE, number * PAGE, PAGE) for number in range(PAGES)]


def fill(memory, first):
    """Each page has its own number, from this one on."""
    numpy.asarray(memoryview(memory)).reshape(PAGES, PAGE)[:] = numpy.arange(first, first + PAGES)[:, None]


def pages(memory):
    """The number of each page; a page of different bytes is -1."""
    rows = numpy.frombuffer(memory.tobytes(), "uint8").reshape(PAGES, PAGE)
    return [int(row[0]) if (row == row[0]).all() else -1 for row in rows]


def notice(agent):
    while True:
        event = agent.next_event(timeout=30)
        assert event is not None
        if event.kind == "notice":
            return event


@pytest.fixture(params=["host", "emulated:0"])
def layers(request):
    """Two agents, and routes from regions of the one to regions of the other."""
    with fabricast.Agent("here") as here, fabricast.Agent("there") as there:
        peer = here.connect(there.card)
        found = SimpleNamespace(here=here, there=there, peer=peer, location=request.param)
        found.sources, found.targets, found.routes, found.regions = [], [], [], []
        for layer in range(3):
            source, target = (fabricast.allocate((PAGES * PAGE,), "uint8", device=request.param) for _ in range(2))
            fill(source, 20 * layer)
            remote, local = there.register(target, read=True, write=True), here.register(source)
            found.sources.append(source)
            found.targets.append(target)
            found.regions.append((remote, local))
            found.routes.append(here.join(peer, remote.descriptor, local))
        yield found


def test_prepared_transfers_are_repeated_whole_and_by_index(layers):
    here, source, target = layers.here, layers.sources[0], layers.targets[0]
    put = here.prepare(layers.routes[0], ALL, "put")
    assert (len(put), put.nbytes) == (PAGES, PAGES * PAGE)
    assert repr(put) == "<fabricast.PreparedTransfer: put of 16 blocks by same-process>"
    for first in (0, 40):
        fill(source, first)
        assert here.submit(put).wait() == put.nbytes
        assert pages(target) == list(range(first, first + PAGES))
    fill(source, 60)
    assert here.submit(put, [3, 4, 9], notice=(8, b"three")).wait() == 3 * PAGE
    assert (notice(layers.there).tag, pages(target)[3:10]) == (8, [63, 64, 45, 46, 47, 48, 69])
    assert here.submit(put, range(10, 12)).wait() == 2 * PAGE
    assert pages(target)[9:13] == [69, 70, 71, 52]
    assert here.submit(put, []).wait() == 0
    get = here.prepare(layers.routes[0], ALL, "get")
    fill(target, 100)
    assert here.submit(get, (0, 15)).wait() == 2 * PAGE
    assert pages(source) == [100, *range(61, 75), 115]


def test_indices_are_arrays_of_integers(layers):
    here, target = layers.here, layers.targets[0]
    put = here.prepare(layers.routes[0], ALL, "put")
    fill(target, 100)
    expected = list(range(100, 116))
    for number, kind in enumerate(["int32", "uint32", "int64", "uint64"]):
        indices = numpy.array([number, 15 - number], kind)
        assert here.submit(put, indices).wait() == 2 * PAGE
        expected[number], expected[15 - number] = number, 15 - number
        assert pages(target) == expected
    # Every other one of a longer array; and an array of the standard library.
    assert here.submit(put, numpy.arange(4, 12)[::2]).wait() == 4 * PAGE
    assert pages(target)[4:12] == [4, 105, 6, 107, 8, 109, 10, 111]
    assert here.submit(put, array.array("i", [5])).wait() == PAGE
    assert pages(target)[5] == 5
    for wrong in (numpy.array([0.5]), numpy.array([1], "uint8"), numpy.zeros((2, 2), "int32")):
        with pytest.raises(errors.InvalidArgument, match="possible|one dimension"):
            here.submit(put, wrong)
    for wrong in ([16], [-1], numpy.array([0, 16]), numpy.array([-1]), numpy.array([1 << 40])):
        with pytest.raises(IndexError, match="index (16|-1|1099511627776) of 16 blocks"):
            here.submit(put, wrong)
    with pytest.raises(errors.InvalidArgument, match="2\\^63"):
        here.submit(put, numpy.array([1 << 63], "uint64"))
    for wrong in (["a"], [1.5], "1", 7, {1}):
        with pytest.raises((TypeError, errors.InvalidArgument)):
            here.submit(put, wrong)
    assert here.submit(put, numpy.array([], "int32")).wait() == 0


def test_blocks_are_lists_arrays_and_rows(layers):
    here, route, target = layers.here, layers.routes[0], layers.targets[0]
    fill(target, 100)
    assert here.put(route, numpy.array(ALL[:2])).wait() == 2 * PAGE
    assert pages(target)[:3] == [0, 1, 102]
    rows = here.prepare(route, fabricast.Strided.rows(4, PAGE, 2 * PAGE, PAGE), "put")
    assert len(rows) == 4
    assert here.submit(rows, [1, 3]).wait() == 2 * PAGE
    assert pages(target)[:5] == [0, 2, 102, 6, 104]
    whole = here.prepare(route, None, "put")
    assert (len(whole), whole.nbytes) == (1, PAGES * PAGE)
    with pytest.raises(errors.InvalidArgument, match="shape \\(n, 3\\)"):
        here.put(route, numpy.zeros(6, "int64"))
    with pytest.raises(errors.InvalidArgument, match="-1"):
        here.put(route, numpy.array([[0, -1, 8]]))
    with pytest.raises(errors.InvalidArgument, match="operation=\"copy\""):
        here.prepare(route, ALL, "copy")
    with pytest.raises(IndexError):
        here.prepare(route, [(0, PAGES * PAGE, 1)], "get")


def test_foreign_routes_and_closed_agents_are_refused(layers):
    here, there = layers.here, layers.there
    put = here.prepare(layers.routes[0], ALL, "put")
    with pytest.raises(errors.Stale, match="another agent"):
        there.prepare(layers.routes[0], ALL, "put")
    with pytest.raises(errors.Stale, match="another agent"):
        there.submit(put)
    with pytest.raises(errors.Stale, match="another agent"):
        there.put_parts([(layers.routes[0], ALL)])
    with pytest.raises(TypeError):
        here.submit(layers.routes[0])
    operation = here.submit(put)
    operation.wait()
    here.close()
    with pytest.raises(errors.Closed):
        here.submit(put)
    with pytest.raises(errors.Closed):
        operation.cancel()


def test_one_notice_follows_the_data_of_several_regions(layers):
    here, routes = layers.here, layers.routes
    parts = [(routes[0], ALL[1:3]), (routes[1], numpy.array(ALL[4:5])), (routes[2], None)]
    assert here.put_parts(parts, notice=(5, b"layers")).wait() == (2 + 1 + PAGES) * PAGE
    assert notice(layers.there).tag == 5
    assert pages(layers.targets[0])[:4] == [0, 1, 2, 0]
    assert pages(layers.targets[1])[3:6] == [0, 24, 0]
    assert pages(layers.targets[2]) == list(range(40, 56))
    for number, target in enumerate(layers.targets):
        fill(target, 100 + 20 * number)
    assert here.get_parts(list(zip(routes, [ALL[:1]] * 3))).wait() == 3 * PAGE
    assert [pages(source)[:2] for source in layers.sources] == [[100, 1], [120, 21], [140, 41]]
    # Nothing is copied if one part is wrong.
    with pytest.raises(IndexError):
        here.put_parts([(routes[0], ALL), (routes[1], [(0, 1, PAGES * PAGE)])])
    assert pages(layers.targets[0])[1] == 101
    with pytest.raises(errors.Malformed, match="without routes"):
        here.put_parts([])
    second = here.connect(layers.there.card)
    other = here.join(second, layers.regions[0][0].descriptor, layers.regions[0][1])
    with pytest.raises(errors.Malformed, match="different peers"):
        here.get_parts([(routes[0], ALL), (other, ALL)])
    with pytest.raises(TypeError):
        here.put_parts([routes[0]])


def test_transfers_follow_streams(layers):
    here, route, source, target = layers.here, layers.routes[0], layers.sources[0], layers.targets[0]
    if layers.location == "host":
        with pytest.raises(errors.InvalidArgument, match="device of the stream is not known"):
            here.put(route, stream=0)
        return
    # Only the library begins work on streams of emulated devices: the test sees the order of its own calls.
    for first in range(60, 70):
        fill(source, first)
        put = here.put(route, stream=0)
        put.delay_stream(0)
        assert put.wait() == PAGES * PAGE and pages(target) == list(range(first, first + PAGES))
        put.delay_stream(0, timeout=0)
        both = here.put_parts([(route, ALL[:8]), (layers.routes[1], ALL)])
        both.delay_stream(0, timeout=0)
        both.wait()
    fill(target, 100)
    assert here.get(route, ALL[:1], stream=0).wait() == PAGE
    get = here.prepare(route, ALL, "get")
    assert here.submit(get, [1, 2], stream=0, notice=(3, b"")).wait() == 2 * PAGE
    assert pages(source)[:4] == [100, 101, 102, 72] and notice(layers.there).tag == 3
    with pytest.raises(errors.NotSupported, match="emulated"):
        here.put(route, stream=4096)
    with pytest.raises(errors.NotSupported, match="emulated"):
        here.submit(get, stream=4096)
    with pytest.raises(errors.NotSupported, match="emulated"):
        put.delay_stream(4096)


class Stream:
    def __init__(self, version=0, handle=0):
        self.answer = version, handle

    def __cuda_stream__(self):
        return self.answer


def test_streams_are_objects_of_several_libraries(layers):
    if layers.location == "host":
        return
    here, route = layers.here, layers.routes[0]
    of_torch = SimpleNamespace(cuda_stream=0)
    for stream in (0, Stream(), of_torch):
        assert here.put(route, stream=stream).wait() == PAGES * PAGE
    with pytest.raises(errors.InvalidArgument, match="version 7"):
        here.put(route, stream=Stream(7))
    put = here.put(route)
    for wrong in ("0", 1.5, object(), []):
        with pytest.raises(TypeError, match="is no stream"):
            here.put(route, stream=wrong)
        with pytest.raises(TypeError, match="is no stream"):
            put.delay_stream(wrong)
    with pytest.raises(OverflowError):
        here.put(route, stream=-1)
    # A stream of a device that this process does not have.
    far = SimpleNamespace(cuda_stream=0, device=SimpleNamespace(index=77))
    with pytest.raises((errors.Unavailable, errors.NoDevice)):
        here.put(route, stream=far)
    put.wait()


def test_cancelled_operations_end_and_send_no_notice(layers):
    here, there, route, peer = layers.here, layers.there, layers.routes[0], layers.peer
    put = here.put(route)
    assert put.wait() == PAGES * PAGE and put.cancel() is False
    cancelled = 0
    for attempt in range(20):
        before = [here.put(route) for _ in range(300)]
        here.fence(peer)
        last = here.put(route, notice=(1, b"cancelled"))
        is_cancelled = last.cancel()
        if is_cancelled:
            cancelled += 1
            assert last.cancel() is False
            with pytest.raises(errors.Cancelled, match="was cancelled"):
                last.wait()
            with pytest.raises(errors.Failed):
                here.flush(peer)
        else:
            last.wait()
            assert notice(there).tag == 1
        for operation in before:
            operation.wait()
        here.flush(peer)
        if cancelled == 2:
            break
    # Where the processor copies, the operations before the fence may be over.
    assert cancelled or layers.location == "host"
    here.put(route, notice=(2, b"")).wait()
    assert notice(there).tag == 2


PEER = """
import sys, fabricast
agent = fabricast.Agent("peer", directory=sys.argv[1])
memory = fabricast.allocate((16 * 4096,), "uint8", device="emulated:0")
region = agent.register(memory, read=True, write=True)
print(agent.card.hex(), region.descriptor.hex(), flush=True)
while True:
    event = agent.next_event(timeout=None)
    if event.kind == "left":
        break
    if event.kind == "notice":
        print(*memory.tobytes()[::4096], flush=True)
agent.close()
"""


def test_requests_reach_another_process_by_several_paths(tmp_path):
    command = [sys.executable, "-c", PEER, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    card, descriptor = map(bytes.fromhex, process.stdout.readline().split())
    with fabricast.Agent("here", directory=tmp_path) as here:
        source = fabricast.allocate((PAGES * PAGE,), "uint8", device="emulated:0")
        local, peer = here.register(source), here.connect(card)
        expected = [0] * PAGES
        for first, path in ((10, "cuda-ipc"), (40, "host-staged")):
            route = here.join(peer, descriptor, local, policy=f"={path}")
            assert route.path == path
            fill(source, first)
            prepared = here.prepare(route, numpy.array(ALL), "put")
            indices = numpy.arange(first // 40, PAGES, 3)
            put = here.submit(prepared, indices, stream=0, notice=(1, b""))
            try:
                # An operation that is over delays nothing on any path.
                put.delay_stream(0)
            except errors.NoPath as error:
                assert path == "host-staged" and "for host-staged. Wait" in str(error)
            assert put.wait() == len(indices) * PAGE
            for index in map(int, indices):
                expected[index] = first + index
            assert process.stdout.readline().split() == [str(page) for page in expected]
        here.disconnect(peer)
    assert process.wait(30) == 0
