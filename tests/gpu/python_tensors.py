"""The package for Python with tensors of CUDA devices.

    python python_tensors.py [--memory plain|expandable|pool] [--measure] [PART...]

Needs PyTorch, NumPy and the package on the path. Each part prints its name and "ok". --memory says of which allocator
the tensors are that other processes map: cudaMalloc, expandable segments (PYTORCH_CUDA_ALLOC_CONF has to say so, too),
or fabricast.torch.pool. --measure times sending, in turn with torch.multiprocessing.
"""

import argparse
import contextlib
import ctypes
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings

import numpy
import torch
import torch.multiprocessing as multiprocessing

import fabricast
import fabricast._native
import fabricast.torch
from fabricast import errors

PARTS = []
MEMORY = "plain"
LAST = "cuda:0"


def part(function):
    PARTS.append(function)
    return function


def exportable(device=None):
    """Allocates tensors as --memory says."""
    return fabricast.torch.pool(device or LAST) if MEMORY == "pool" else contextlib.nullcontext()


class Child:
    """Another process that runs a function with a connection."""

    def __init__(self, function, *arguments):
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_child, args=(function, there, *arguments))
        self.process.start()
        there.close()

    def ask(self, *words):
        self.connection.send(words)
        return self.hear()

    def hear(self):
        if not self.connection.poll(100):
            raise TimeoutError("the other process says nothing")
        heard = self.connection.recv()
        if isinstance(heard, BaseException):
            raise heard
        return heard

    def finish(self):
        self.process.join(60)
        assert self.process.exitcode == 0, self.process.exitcode


def _child(function, connection, *arguments):
    try:
        function(connection, *arguments)
    except BaseException as error:
        traceback.print_exc()
        connection.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise


@part
def devices():
    found = [device["name"] for device in fabricast.info()["devices"]]
    assert "cuda:0" in found, found
    print(fabricast.info()["devices"][0])


@part
def topics():
    with tempfile.TemporaryDirectory() as directory, fabricast.Node(directory) as node:
        topic = node.topic("tensors", memory=LAST, largest=1 << 24)
        with topic.publisher() as publisher, topic.subscriber() as subscriber:
            whole = torch.arange(1 << 20, dtype=torch.float32, device=LAST).reshape(1024, 1024)
            for sent in (whole, whole.T, whole[::2, 1::3], whole[5], whole.to(torch.bfloat16), whole.cpu()):
                publisher.publish(sent)
                sample = subscriber.pull()
                assert sample.array.device == LAST and sample.array.readonly
                received = torch.from_dlpack(sample.array)
                assert received.device == torch.device(LAST), received.device
                assert torch.equal(received, sent.to(LAST))
                assert sample.array.tobytes() == sent.cpu().contiguous().view(torch.uint8).numpy().tobytes()
                del received
                sample.release()
            # A stream of the framework still reads the message when it is given up.
            stream = torch.cuda.Stream(LAST)
            for number in range(50):
                publisher.publish(whole + number)
                with torch.cuda.stream(stream):
                    received = torch.from_dlpack(subscriber.pull().array)
                    for _ in range(20):
                        total = received.double().sum()
                    del received
                assert total.item() == (whole + number).double().sum().item()
            # Written in place, on a stream.
            with publisher.loan((1024,), torch.float32) as loan:
                with torch.cuda.stream(stream):
                    torch.from_dlpack(loan.array).fill_(7)
                gc.collect()
            assert torch.from_dlpack(subscriber.pull().array).sum().item() == 7168
            interface = publisher.loan((3, 4), "float32").array.__cuda_array_interface__
            assert interface["shape"] == (3, 4) and interface["data"][0] % 256 == 0


@part
def arrays_are_indexed_by_the_framework():
    array = fabricast.allocate((4, 8), "float32", device=LAST)
    array[...] = torch.arange(32, dtype=torch.float32, device=LAST).reshape(4, 8)
    array[1, :2] = 5
    assert isinstance(array[1], torch.Tensor) and array[1].device == torch.device(LAST)
    assert array[1].tolist() == [5, 5, 10, 11, 12, 13, 14, 15]
    assert repr(array) == f"<fabricast.Array float32[4,8] on {LAST}>"
    assert (array.dtype, array.size, len(array)) == (numpy.float32, 32, 4)
    try:
        numpy.asarray(array)
    except TypeError as error:
        assert "torch.from_dlpack(array)" in str(error)
    else:
        raise AssertionError("NumPy reads memory of a device")
    assert numpy.from_dlpack(array, device="cpu")[3, 7] == 31
    with tempfile.TemporaryDirectory() as directory, fabricast.Node(directory) as node:
        topic = node.topic("tensors", memory=LAST, dtype=torch.bfloat16, shape=1024)
        with topic.publisher() as publisher, topic.subscriber() as subscriber:
            with publisher.loan() as loan:
                loan.array[...] = torch.full((1024,), 3.0, device=LAST)
            assert torch.from_dlpack(subscriber.pull().array).double().sum().item() == 3072
            try:
                subscriber.pull(0)
            except TimeoutError:
                pass
            # A view that is left: a copy is published, after the work of its stream.
            stream = torch.cuda.Stream(LAST)
            for number in range(20):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    with publisher.loan() as loan, torch.cuda.stream(stream):
                        view = torch.from_dlpack(loan.array)
                        torch.cuda._sleep(1_000_000)
                        view.fill_(number)
                assert [warning.category for warning in caught] == [errors.CopyWarning]
                sample = subscriber.pull()
                view.fill_(99)
                assert torch.from_dlpack(sample.array).double().sum().item() == 1024 * number
                del sample


def _structure_reader(connection, directory):
    opened = fabricast.torch.open(connection.recv(), directory=directory)
    connection.send((str(opened["layers"][3]["weight"].device), opened["layers"][3]["weight"].double().sum().item()))
    opened["layers"][2]["bias"].fill_(9)
    torch.cuda.synchronize()
    connection.send(opened["step"])
    connection.recv()


@part
def structures_of_tensors():
    with tempfile.TemporaryDirectory() as directory:
        with exportable():
            layers = [
                {"weight": torch.full((64, 32), float(number), device=LAST), "bias": torch.zeros(64, device=LAST)}
                for number in range(20)
            ]
        child = Child(_structure_reader, directory)
        with fabricast.share({"layers": layers, "step": 7}, directory=directory) as shared:
            child.connection.send(shared.token)
            assert child.hear() == (LAST, 3.0 * 64 * 32)
            assert child.hear() == 7
            assert layers[2]["bias"].sum().item() == 9 * 64
            child.connection.send("end")
            child.finish()
        with fabricast.share({"layers": layers}, copy=True, directory=directory) as shared:
            opened = fabricast.open(shared.token, directory=directory)
            assert opened["layers"][5]["weight"].device == "host" and opened["layers"][5]["weight"][63, 31] == 5


def _pickled_writer(connection):
    array = connection.recv()
    torch.from_dlpack(array).fill_(4)
    torch.cuda.synchronize()
    connection.send(array.device)
    connection.recv()


@part
def arrays_are_pickled():
    array = fabricast.allocate(1 << 10, "float32", device=LAST)
    child = Child(_pickled_writer)
    child.connection.send(array)
    assert child.hear() == LAST
    assert torch.from_dlpack(array).sum().item() == 4096
    child.connection.send("end")
    child.finish()


@part
def memory_of_other_topics_is_not_shown():
    with tempfile.TemporaryDirectory() as directory, fabricast.Node(directory) as node:
        both = [node.topic(name, memory=LAST, largest=1 << 20, depth=1, loans=1) for name in ("one", "two")]
        publishers = [topic.publisher() for topic in both]
        subscribers = [topic.subscriber() for topic in both]
        for size in (1, 4099, 1 << 20):
            places = [set(), set()]
            for number in range(20):
                which = number % 2
                loan = publishers[which].loan((size,), "uint8")
                places[which].add(loan.array.__cuda_array_interface__["data"][0])
                memory = torch.from_dlpack(loan.array)
                shown = set(memory.unique().tolist())
                assert shown <= {0, 1 + which}, (size, which, shown)
                memory.fill_(1 + which)
                del memory
                loan.publish()
                subscribers[which].pull().release()
            assert places[0] & places[1], "no memory passed between the topics"


def _held_publisher(connection, directory, device):
    torch.cuda.set_device(device)
    with fabricast.Node(directory) as node:
        topic = node.topic("held", memory=device, largest=1 << 20, depth=2, max_held=8, release_deadline=0.5)
        publisher = topic.publisher()
        connection.send("ready")
        publisher.wait_for_subscribers(1)
        for number in itertools.count():
            publisher.publish(torch.full((1 << 18,), number, dtype=torch.int32, device=device))
            time.sleep(0.001)


@part
def held_tensors_do_not_change_over_evictions_and_kills():
    with tempfile.TemporaryDirectory() as directory:
        first, second = publishers = [Child(_held_publisher, directory, LAST) for _ in range(2)]
        assert [child.hear() for child in publishers] == ["ready", "ready"]
        comparisons = 0

        def compare(seconds):
            nonlocal comparisons
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                for tensor, copy in tensors:
                    assert torch.equal(tensor, copy), (tensor, copy)
                    comparisons += 1

        with fabricast.Node(directory, service="external") as node:
            topic = node.open("held")
            with topic.subscriber() as subscriber:
                tensors = [torch.from_dlpack(subscriber.pull().array) for _ in range(6)]
                assert all((tensor == tensor[0]).all() for tensor in tensors)
                tensors = [(tensor, tensor.clone()) for tensor in tensors]
                compare(1)
                try:
                    while True:
                        subscriber.pull(timeout=10)
                except errors.Evicted:
                    pass
                first.process.kill()
                compare(0.7)
                publishers.append(Child(_held_publisher, directory, LAST))
                assert publishers[-1].hear() == "ready"
                second.process.kill()
                compare(0.7)
            with topic.subscriber() as again:
                for _ in range(20):
                    later = torch.from_dlpack(again.pull(timeout=10).array)
                    assert (later == later[0]).all()
                    del later
            compare(0.1)
        compare(0.1)
        print(f"{comparisons} comparisons")
        tensors.clear()
        publishers[-1].process.kill()


def _writer(connection):
    received = fabricast.torch.recv(connection)
    connection.send((tuple(received.shape), received.stride(), str(received.device), received.double().sum().item()))
    received.fill_(5)
    torch.cuda.synchronize(received.device)
    connection.send("written")
    connection.recv()
    del received


@part
def views_in_another_process():
    with exportable():
        whole = torch.arange(1 << 16, dtype=torch.float32, device=LAST).reshape(256, 256)
    for view in (whole, whole[3:9], whole[:, ::2], whole.T, whole[7, 9], whole[:0]):
        whole.copy_(torch.arange(1 << 16, dtype=torch.float32).reshape(256, 256))
        expected = view.double().sum().item()
        child = Child(_writer)
        fabricast.torch.send(view, child.connection)
        shape, strides, device, total = child.hear()
        assert (shape, strides, total) == (tuple(view.shape), view.stride(), expected), (shape, strides, total)
        assert device == LAST, device
        assert child.hear() == "written"
        assert view.double().sum().item() == 5 * view.numel()
        child.connection.send("end")
        child.finish()


def _holder(connection):
    received = fabricast.torch.recv(connection)
    before = received.clone()
    connection.send("received")
    connection.recv()
    connection.send(bool(torch.equal(received, before)))
    del received
    gc.collect()
    connection.recv()


@part
def memory_is_kept_while_others_use_it():
    with exportable():
        sent = torch.full((1 << 20,), 3.0, device=LAST)
        torch.cuda.synchronize()
        child = Child(_holder)
        fabricast.torch.send(sent, child.connection)
        assert child.hear() == "received"
        address = sent.data_ptr()
        del sent
        gc.collect()
        others = [torch.zeros(1 << 20, device=LAST) for _ in range(8)]
        assert address not in [other.data_ptr() for other in others], "it was used again"
        assert child.ask("check") is True
        # The owner hears that it is not used any more.
        end = time.monotonic() + 20
        while address not in [other.data_ptr() for other in others]:
            assert time.monotonic() < end, "it was never released"
            time.sleep(0.01)
            others.append(torch.zeros(1 << 20, device=LAST))
            others = others[-40:]
        child.connection.send("end")
        child.finish()


def _queue_worker(tasks, results):
    for tensor in iter(tasks.get, None):
        tensor.mul_(2)
        results.put((str(tensor.device), tensor.sum().item()))
        del tensor


@part
def queues_of_torch():
    context = multiprocessing.get_context("spawn")
    fabricast.torch.install()
    tasks, results = context.Queue(), context.Queue()
    worker = context.Process(target=_queue_worker, args=(tasks, results))
    worker.start()
    with exportable():
        mine = torch.ones(1000, 1000, device=LAST)
    for tensor, total in ((mine, 2e6), (mine[::2], 2e6), (torch.ones(5), 10)):
        torch.cuda.synchronize()
        tasks.put(tensor)
        assert results.get(timeout=100) == (str(tensor.device), total)
    tasks.put(None)
    worker.join(60)
    assert worker.exitcode == 0


@contextlib.contextmanager
def while_device_works(what):
    """The block does not wait for work of the current stream, which takes a second."""
    # CUDA waits for the device when it loads a kernel.
    torch.zeros(8, device=LAST).fill_(3).sum().item()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    begun = time.monotonic()
    yield
    passed = time.monotonic() - begun
    assert not torch.cuda.current_stream().query(), f"{what}: the work ended before"
    print(f"{what}: {passed * 1e3:.1f} ms")
    assert passed < 0.2, f"{what} took {passed} s"


@part
def calls_do_not_wait_for_work():
    with tempfile.TemporaryDirectory() as directory, fabricast.Node(directory) as node:
        topic = node.topic("late", memory=LAST, largest=1 << 22)
        with topic.publisher() as publisher, topic.subscriber() as subscriber, torch.cuda.device(LAST):
            for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
                with torch.cuda.stream(stream):
                    loan = publisher.loan((1 << 20,), torch.float32)
                    written = torch.from_dlpack(loan.array)
                    with while_device_works("publication of a loan"):
                        written.fill_(3)
                        del written
                        loan.publish()
                    sample = subscriber.pull()
                    assert sample.array.device == LAST
                    received = torch.from_dlpack(sample.array)
                    with while_device_works("release of a sample"):
                        total = received.sum()
                        del received
                        sample.release()
                        del sample
                    assert total.item() == 3 << 20
    library = ctypes.CDLL(fabricast._native.__file__)
    allocate, free = library.fabricast_torch_malloc, library.fabricast_torch_free
    allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    free.restype, free.argtypes = None, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    number, length = torch.device(LAST).index, 1 << 20
    with torch.cuda.device(LAST), torch.cuda.stream(torch.cuda.Stream()):
        handle = torch.cuda.current_stream().cuda_stream
        block = allocate(length, number, handle)
        with while_device_works("100 blocks of the pool, each freed before"):
            for _ in range(100):
                free(block, length, number, handle)
                assert allocate(length, number, handle) == block
        free(block, length, number, handle)


@part
def pool_of_tensors():
    kept = fabricast.torch.pool(LAST)
    before = fabricast.torch.pool_statistics(LAST)["allocations"]
    with kept:
        tensors = [torch.full((n * 1000 + 1,), float(n), device=LAST) for n in range(200)]
        large = torch.empty(300 << 20, dtype=torch.uint8, device=LAST)
    found = fabricast.torch.pool_statistics(LAST)
    print(found)
    assert found["allocations"] > before and found["allocated"] >= 300 << 20
    outside = torch.ones(10, device=LAST)
    assert all(tensor.eq(n).all().item() for n, tensor in enumerate(tensors))
    # A graph whose tensors are of the pool.
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(LAST)
    with kept:
        static = torch.zeros(1000, device=LAST)
    with torch.cuda.stream(stream):
        for _ in range(3):
            result = (static * 2 + 1).sum()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        result = (static * 2 + 1).sum()
    static.fill_(4)
    graph.replay()
    torch.cuda.synchronize()
    assert result.item() == 9000
    del tensors, large, static, kept, outside, graph, result
    gc.collect()
    torch.cuda.empty_cache()
    fabricast.torch.trim_pool(LAST)
    print(fabricast.torch.pool_statistics(LAST))


def _agent_peer(connection, directory, device):
    # PyTorch exports tensors of the current device only.
    torch.cuda.set_device(device)
    agent = fabricast.Agent("peer", directory=directory)
    inbox = torch.zeros(1 << 20, device=device)
    region = agent.register(inbox, read=True, write=True)
    connection.send((agent.card, region.descriptor))
    event = agent.next_event(timeout=60)
    while event is not None and event.kind != "notice":
        event = agent.next_event(timeout=60)
    torch.cuda.synchronize()
    connection.send((event.tag, inbox.double().sum().item()))
    connection.recv()
    region.close()
    agent.close()


@part
def agents():
    other = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
    with tempfile.TemporaryDirectory() as directory:
        child = Child(_agent_peer, directory, other)
        card, descriptor = child.hear()
        with fabricast.Agent("here", directory=directory) as agent:
            with exportable("cuda:0"):
                outbox = torch.full((1 << 20,), 2.0, device="cuda:0")
            torch.cuda.synchronize()
            # PyTorch exports tensors of the current device only.
            with torch.cuda.device("cuda:0"):
                region = agent.register(outbox)
            route = agent.join(agent.connect(card), descriptor, region)
            print(route, route.fallback)
            agent.put(route, notice=(9, b"")).wait()
            assert child.hear() == (9, 2.0 * (1 << 20))
            child.connection.send("end")
            child.finish()


@part
def devices_read_each_other():
    if torch.cuda.device_count() < 2:
        print("skipped: one GPU")
        return
    child = Child(_reader_on_other_device)
    with exportable("cuda:0"):
        sent = torch.arange(1 << 26, dtype=torch.float32, device="cuda:0")
    torch.cuda.synchronize()
    fabricast.torch.send(sent, child.connection)
    device, total, rate, raw = child.hear()
    assert device == "cuda:0" and total == sent.double().sum().item(), (device, total)
    print(f"GPU 1 reads the tensor of GPU 0 at {rate:.1f} GB/s, a raw peer copy {raw:.1f} GB/s: {rate / raw:.3f}")
    child.connection.send("end")
    child.finish()


def _reader_on_other_device(connection):
    torch.cuda.set_device(1)
    received = fabricast.torch.recv(connection)
    here = torch.empty(received.shape, device="cuda:1")
    own = torch.empty(received.shape, device="cuda:0")

    def rate(source):
        times = []
        for _ in range(12):
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
            start = time.perf_counter()
            here.copy_(source)
            torch.cuda.synchronize(1)
            torch.cuda.synchronize(0)
            times.append(time.perf_counter() - start)
        return received.numel() * 4 / statistics.median(times[2:]) / 1e9

    raw, mapped = rate(own), rate(received)
    here.copy_(received)
    connection.send((str(received.device), here.double().sum().item(), mapped, raw))
    connection.recv()
    # Both may write.
    received[:5].copy_(torch.zeros(5, device="cuda:1"))
    torch.cuda.synchronize(0)


@part
def errors_are_clear():
    # In the same process: memory of cudaMalloc is refused.
    with exportable():
        message = fabricast.torch.token(torch.ones(3, device=LAST))
    try:
        assert torch.equal(fabricast.torch.load(message).cpu(), torch.ones(3)) and MEMORY != "plain"
    except errors.WrongMemory as error:
        assert MEMORY == "plain" and "cudaMalloc" in str(error), error
    for wrong in (torch.ones(3, device=LAST).to_sparse(), torch.ones(3, device=LAST, requires_grad=True) * 2):
        try:
            fabricast.torch.token(wrong)
            raise AssertionError("accepted")
        except errors.InvalidArgument:
            pass


# ------------------------------------------------------------------ measurements


def _echo(connection, way, there, back):
    if way == "ours":
        fabricast.torch.install()
    for tensor in iter(there.get, None):
        tensor.view(-1)[:1].add_(1)
        torch.cuda.synchronize()
        back.put(tensor.data_ptr() % 2)
        del tensor


def _echo_by_pipe(connection):
    while connection.recv_bytes(16) != b"end":
        tensor = fabricast.torch.recv(connection)
        tensor.view(-1)[:1].add_(1)
        torch.cuda.synchronize()
        connection.send_bytes(b"done")
        del tensor


def _echo_by_topic(connection, directory, waiting):
    with fabricast.Node(directory, waiting=waiting) as node:
        subscriber = node.open("tensors").subscriber()
        publisher = node.open("replies").publisher()
        connection.send("ready")
        touches = []
        for sample in subscriber:
            tensor = torch.from_dlpack(sample.array)
            if tensor.numel() == 1:
                connection.send(1e6 * statistics.median(touches[50:]))
                return
            # Messages are read-only by contract: this one is read.
            start = time.perf_counter()
            tensor[:1].clone()
            torch.cuda.synchronize()
            touches.append(time.perf_counter() - start)
            publisher.publish(b"done")
            del tensor, sample


def measure_touch():
    """The touch alone, in one process: the median in microseconds."""
    tensor = torch.ones(1024, device="cuda:0")
    times = []
    for _ in range(200):
        start = time.perf_counter()
        tensor[:1].clone()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times[20:])


def measure_topic(size, waiting):
    """Like `measure`, for a tensor that is written in the memory of a message: the medians of the whole and of the touch by
    the other process, in microseconds."""
    with tempfile.TemporaryDirectory() as directory, fabricast.Node(directory, waiting=waiting) as node:
        topic = node.topic("tensors", memory="cuda:0", largest=size, depth=2, loans=2)
        replies = node.topic("replies").subscriber()
        publisher = topic.publisher()
        child = Child(_echo_by_topic, directory, waiting)
        assert child.hear() == "ready"
        publisher.wait_for_subscribers()
        times = []
        for _ in range(200):
            loan = publisher.loan((size // 4,), "float32")
            start = time.perf_counter()
            loan.publish()
            replies.pull().release()
            times.append(time.perf_counter() - start)
        publisher.publish(torch.zeros(1, device="cuda:0"))
        touch = child.hear()
        child.finish()
        return 1e6 * statistics.median(times[50:]), touch


def _echo_by_token(connection, directory, waiting):
    with fabricast.Node(directory, waiting=waiting) as node:
        subscriber = node.open("tokens").subscriber()
        publisher = node.open("replies").publisher()
        connection.send("ready")
        held, touches = [], []
        for sample in subscriber:
            token = sample.array.tobytes()
            sample.release()
            if token == b"end":
                connection.send(1e6 * statistics.median(touches[50:]))
                return
            tensor = fabricast.torch.open(token, directory=directory)
            # The memory stays mapped.
            held = held or [tensor]
            start = time.perf_counter()
            tensor.view(-1)[:1].clone()
            torch.cuda.synchronize()
            touches.append(time.perf_counter() - start)
            publisher.publish(b"done")
            del tensor


def measure_token(tensor, waiting):
    """Like `measure_topic`, for a tensor that is shared by its token."""
    with tempfile.TemporaryDirectory() as directory, fabricast.Node(directory, waiting=waiting) as node:
        publisher = node.topic("tokens").publisher()
        replies = node.topic("replies").subscriber()
        child = Child(_echo_by_token, directory, waiting)
        assert child.hear() == "ready"
        publisher.wait_for_subscribers()
        times = []
        with fabricast.share(tensor, directory=directory) as shared:
            token = shared.token
            for _ in range(200):
                start = time.perf_counter()
                publisher.publish(token)
                replies.pull().release()
                times.append(time.perf_counter() - start)
            publisher.publish(b"end")
            touch = child.hear()
            child.finish()
        return 1e6 * statistics.median(times[50:]), touch


def measure():
    torch.cuda.set_device(0)
    _measure()


def _measure():
    """Put, touched by the other process, replied: medians in microseconds."""
    context = multiprocessing.get_context("spawn")
    from multiprocessing.reduction import ForkingPickler

    plain_reducers = dict(ForkingPickler._extra_reducers)
    fabricast.torch.install()
    own_reducers = dict(ForkingPickler._extra_reducers)

    def use(reducers):
        ForkingPickler._extra_reducers.clear()
        ForkingPickler._extra_reducers.update(reducers)

    queues = {}
    for way in ("torch", "ours"):
        there, back = context.Queue(), context.Queue()
        use(plain_reducers)
        process = context.Process(target=_echo, args=(None, way, there, back))
        process.start()
        queues[way] = (there, back, process)
    pipe = Child(_echo_by_pipe)
    print(f"touch and synchronize alone: {measure_touch():.0f} us")
    for size in (4 << 20, 64 << 20, 1 << 30):
        with exportable("cuda:0"):
            tensor = torch.ones(size // 4, device="cuda:0")
        ordinary = torch.ones(size // 4, device="cuda:0")
        torch.cuda.synchronize()
        times = {"torch": [], "ours": [], "send": []}

        def by_queue(way):
            use(plain_reducers if way == "torch" else own_reducers)
            there, back, _ = queues[way]
            there.put(ordinary if way == "torch" else tensor)
            back.get(timeout=100)

        def by_pipe(way):
            pipe.connection.send_bytes(b"next")
            fabricast.torch.send(tensor, pipe.connection)
            pipe.connection.recv_bytes(16)

        # In turn, in blocks: a GPU takes its time to switch between processes.
        for _ in range(4):
            for way, exchange in (("torch", by_queue), ("ours", by_queue), ("send", by_pipe)):
                for number in range(25):
                    start = time.perf_counter()
                    exchange(way)
                    if number >= 5:
                        times[way].append(time.perf_counter() - start)
        medians = {way: 1e6 * statistics.median(all_times) for way, all_times in times.items()}
        print(
            f"{size >> 20} MiB: torch.multiprocessing {medians['torch']:.0f} us, with fabricast.torch.install "
            f"{medians['ours']:.0f} us, fabricast.torch.send {medians['send']:.0f} us: "
            f"{medians['torch'] / medians['send']:.1f} times as fast"
        )
        for waiting in ("adaptive", "busy"):
            topic, touch = measure_topic(size, waiting)
            print(
                f"{size >> 20} MiB: loan of a topic, waiting {waiting}: {topic:.0f} us, of which the touch "
                f"{touch:.0f} us: {medians['torch'] / topic:.1f} times as fast"
            )
            token, touch = measure_token(tensor, waiting)
            print(
                f"{size >> 20} MiB: token of a topic, waiting {waiting}: {token:.0f} us, of which the touch "
                f"{touch:.0f} us: {medians['torch'] / token:.1f} times as fast"
            )
        del tensor, ordinary
    use(plain_reducers)
    for there, _, process in queues.values():
        there.put(None)
        process.join(60)
    pipe.connection.send_bytes(b"end")
    pipe.finish()


def main():
    global MEMORY, LAST
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", choices=("plain", "expandable", "pool"), default="plain")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("parts", nargs="*")
    options = parser.parse_args()
    MEMORY = options.memory
    LAST = f"cuda:{torch.cuda.device_count() - 1}"
    torch.cuda.set_device(LAST)
    print(f"PyTorch {torch.__version__}, NumPy {numpy.__version__}, {MEMORY}, {LAST}")
    failed = []
    os.environ["FABRICAST_DIRECTORY"] = tempfile.mkdtemp()
    for function in PARTS:
        if options.parts and function.__name__ not in options.parts:
            continue
        start = time.monotonic()
        try:
            function()
            print(f"{function.__name__}: ok, {time.monotonic() - start:.1f} s", flush=True)
        except Exception:
            traceback.print_exc()
            failed.append(function.__name__)
            print(f"{function.__name__}: FAILED", flush=True)
    if options.measure:
        measure()
    if failed:
        sys.exit(f"failed: {' '.join(failed)}")


if __name__ == "__main__":
    main()
