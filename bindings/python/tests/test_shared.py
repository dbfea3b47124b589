"""Memory that several processes share by tokens."""

import gc
import multiprocessing
import os
import signal
import time
import zlib

import fabricast
import pytest
from fabricast import errors

numpy = pytest.importorskip("numpy")
fork = multiprocessing.get_context("fork")


def wait_until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def in_child(function, *arguments):
    """Runs a function in a forked child, and returns its result."""
    here, there = fork.Pipe()

    def run():
        here.close()
        try:
            there.send(function(*arguments))
        except BaseException as error:
            there.send(error)
            raise

    child = fork.Process(target=run)
    child.start()
    there.close()
    found = here.recv()
    child.join(10)
    if isinstance(found, BaseException):
        raise found
    return found


@pytest.mark.parametrize("device", ["host", "emulated:0"])
def test_processes_see_the_same_memory(tmp_path, device):
    weights = fabricast.allocate((3, 4), "float32", device=device)
    view = numpy.asarray(weights)
    view[:] = numpy.arange(12).reshape(3, 4)
    with fabricast.share(weights, directory=tmp_path) as shared:

        def reader(token):
            opened = fabricast.open(token)
            assert (opened.shape, opened.dtype, opened.device) == ((3, 4), "float32", device)
            assert not opened.readonly
            seen = numpy.asarray(opened)
            total = float(seen.sum())
            seen[0, 0] = 100
            return total

        assert in_child(reader, shared.token) == 66
    assert view[0, 0] == 100


VIEWS = {
    "rows": lambda it: it[1:3],
    "columns": lambda it: it[:, 1:7:2],
    "transposed": lambda it: it.T,
    "backwards": lambda it: it[::-1, ::-2],
    "broadcast": lambda it: numpy.broadcast_to(it[0], (3, 8)),
    "scalar": lambda it: it[2, 3],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_shared_with_their_strides(tmp_path, view):
    whole = fabricast.allocate((4, 8), "int32")
    numbers = numpy.asarray(whole)
    numbers[:] = numpy.arange(32).reshape(4, 8)
    part = view(numbers)
    if not isinstance(part, numpy.ndarray):
        part = numbers[2:3, 3:4].reshape(())
    with fabricast.share(part, directory=tmp_path) as shared:
        opened = fabricast.open(shared.token)
        assert opened.shape == part.shape
        seen = numpy.asarray(opened)
        assert numpy.array_equal(seen, part) and numpy.array_equal(numpy.from_dlpack(opened), part)
        assert opened.tobytes() == part.tobytes()
        numbers += 100
        assert numpy.array_equal(seen, part), "it is the same memory"
        assert numpy.array_equal(numpy.array(opened, copy=True), part)


def test_strided_arrays_refuse_consumers_of_flat_buffers(tmp_path):
    whole = fabricast.allocate((4, 4), "uint8")
    with fabricast.share(numpy.asarray(whole)[:, ::2], directory=tmp_path) as shared:
        opened = fabricast.open(shared.token)
        assert opened.strides == (4, 2)
        with pytest.raises(BufferError, match="strided"):
            zlib.crc32(opened)
        assert memoryview(opened).tolist() == [[0, 0]] * 4
        assert opened.__array_interface__["strides"] == (4, 2)


def test_memory_of_others_is_copied_on_request(tmp_path):
    mine = numpy.arange(6.0).reshape(2, 3).T
    with pytest.raises(errors.InvalidArgument, match="copy=True"):
        fabricast.share(mine, directory=tmp_path)
    with fabricast.share(mine, copy=True, directory=tmp_path) as shared:
        assert numpy.array_equal(numpy.asarray(fabricast.open(shared.token)), mine)
    with fabricast.share(numpy.zeros((0, 3)), directory=tmp_path) as shared:
        assert fabricast.open(shared.token).shape == (0, 3)


def test_readers_cannot_write(tmp_path):
    mine = fabricast.allocate((16,), "uint8")
    with fabricast.share(mine, readonly=True, directory=tmp_path) as shared:
        opened = fabricast.open(shared.token)
        assert opened.readonly and not numpy.asarray(opened).flags.writeable
        numpy.asarray(mine)[3] = 9
        assert numpy.asarray(opened)[3] == 9


def stop(child):
    """Stops a child: when this returns, no thread of it runs."""
    os.kill(child.pid, signal.SIGSTOP)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def test_memory_for_one_receiver(tmp_path):
    def share():
        mine = fabricast.allocate((16,), "uint8")
        numpy.asarray(mine)[:] = 5
        return fabricast.share(mine, directory=tmp_path).for_one_receiver()

    token = share()
    assert numpy.asarray(fabricast.open(token)).sum() == 80
    with pytest.raises(errors.Unknown, match="does not share it any more"):
        fabricast.open(token)


def test_interrupted_opening_leaves_the_memory_to_its_receiver(tmp_path):
    here, there = fork.Pipe()

    def owner():
        mine = fabricast.allocate((4,), "int64")
        mine[...] = 7
        there.send_bytes(fabricast.share(mine, directory=tmp_path).for_one_receiver())
        time.sleep(60)

    child = fork.Process(target=owner)
    child.start()
    token = here.recv_bytes()
    stop(child)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            fabricast.open(token, timeout=30)
        assert time.monotonic() - begin < 10
        with pytest.raises(errors.DeadlineExceeded):
            fabricast.open(token, timeout=0.3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.kill(child.pid, signal.SIGCONT)
    # The owner hears of the interrupted calls first.
    assert numpy.asarray(fabricast.open(token)).sum() == 28
    child.kill()
    child.join()


def test_memory_outlives_its_owner(tmp_path):
    here, there = fork.Pipe()

    def owner():
        mine = fabricast.allocate((1000,), "int64")
        numpy.asarray(mine)[:] = 7
        with fabricast.share(mine, directory=tmp_path) as shared:
            there.send_bytes(shared.token)
            with fabricast.share(mine, directory=tmp_path) as other:
                there.send_bytes(other.token)
                time.sleep(60)

    child = fork.Process(target=owner)
    child.start()
    token, other = here.recv_bytes(), here.recv_bytes()
    opened = numpy.asarray(fabricast.open(token))
    stop(child)
    # A stopped owner is not asked.
    assert numpy.asarray(fabricast.open(token, timeout=0)).sum() == 7000
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert opened.sum() == 7000
    with pytest.raises(errors.Closed, match="has ended"):
        fabricast.open(other)
    # It is still open in this process.
    assert numpy.asarray(fabricast.open(token)).sum() == 7000
    del opened
    with pytest.raises(errors.Closed, match="has ended"):
        fabricast.open(token)


def test_memory_in_use_is_opened_again_without_its_owner(tmp_path):
    mine = fabricast.allocate((4,), "int64")
    mine[...] = 3
    shared = fabricast.share(mine, directory=tmp_path)
    token = shared.token
    first = fabricast.open(token)
    again = fabricast.open(token)
    assert again._address == first._address
    shared.close()
    assert numpy.asarray(fabricast.open(token)).sum() == 12
    del again, first
    with pytest.raises(errors.Unknown, match="does not share it any more"):
        fabricast.open(token)


def resources():
    gc.collect()
    with open("/proc/self/maps") as maps:
        return len(os.listdir("/proc/self/fd")), sum("fabricast" in line for line in maps)


def test_shares_in_a_loop_leave_nothing(tmp_path):
    """Sender and receiver in turn give up first, are killed, or fork."""
    keep = []

    def round(number):
        mine = fabricast.allocate((1024,), "uint8", device=("host", "emulated:0")[number % 2])
        shared = fabricast.share(mine, directory=tmp_path)
        token = shared.for_one_receiver() if number % 3 == 0 else shared.token
        if number % 5 == 0:
            shared.close()
            if number % 3:
                with pytest.raises(errors.Unknown):
                    fabricast.open(token)
                return
        opened = fabricast.open(token)
        if number % 1000 == 1 and number % 3:
            child = fork.Process(target=fabricast.open, args=(token,))
            child.start()
            child.join(10)
            assert child.exitcode == 0
        if number % 7 == 0:
            del mine, shared
        keep[:] = [numpy.asarray(opened)]

    for number in range(20):
        round(number)
    keep.clear()
    # Mappings of devices are kept for two seconds.
    time.sleep(3)
    before = resources()
    for number in range(10_000):
        round(number)
    keep.clear()
    wait_until(lambda: resources() == before)


def test_hostile_tokens_are_refused(tmp_path):
    mine = fabricast.allocate((16,), "uint8")
    with fabricast.share(mine, directory=tmp_path) as shared:
        token = shared.token
        for length in range(len(token)):
            with pytest.raises(errors.Malformed):
                fabricast.open(token[:length])
        for at in range(len(token)):
            changed = bytearray(token)
            changed[at] ^= 0x40
            with pytest.raises((errors.Malformed, errors.VersionMismatch)):
                fabricast.open(bytes(changed))
    with pytest.raises(errors.InvalidArgument, match="timeout"):
        fabricast.open(token, timeout=-1)
    with pytest.raises(TypeError, match="no array"):
        fabricast.share(object())


def test_information():
    found = fabricast.info()
    assert found["version"] == fabricast.__version__
    assert any(device["name"] == "emulated:1" for device in found["devices"])
    assert found["providers"] or found["no_provider"]
    table = fabricast.paths()
    assert {"situation", "path", "explanation"} == set(table[0])
    assert fabricast.paths("^cuda-ipc")[1]["path"] != "cuda-ipc"


def test_log_is_forwarded_to_loggers(tmp_path):
    """In a process of its own: it can be done once."""

    def body():
        import logging

        records = []
        handler = logging.Handler()
        handler.emit = records.append
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(1)
        fabricast.forward_log("debug")
        with pytest.raises(errors.InvalidArgument, match="already"):
            fabricast.forward_log()
        with fabricast.Node(tmp_path) as node:
            node.topic("logged")
            wait_until(lambda: records)
        return records[0].name.split(".")[0], records[0].levelno <= logging.INFO, bool(records[0].getMessage())

    assert in_child(body) == ("fabricast", True, True)
