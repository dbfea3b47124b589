"""Arrays in messages, by each protocol."""

import array
import contextlib
import ctypes
import gc
import subprocess
import sys
import time

import fabricast
import pytest
from fabricast import errors

numpy = pytest.importorskip("numpy")

NUMPY_TYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "complex64", "complex128",
]


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (0,), (3, 0, 2), (1, 1)])
def test_arrays_of_numpy_arrive_with_type_and_shape(exchange, dtype, shape):
    count = int(numpy.prod(shape))
    sent = numpy.arange(count).reshape(shape).astype(dtype)
    sample = exchange(sent)
    assert (sample.array.dtype, sample.array.shape) == (dtype, shape)
    for received in (numpy.asarray(sample.array), numpy.from_dlpack(sample.array)):
        assert received.dtype == sent.dtype and received.shape == sent.shape
        assert numpy.array_equal(received, sent)
        assert not received.flags.writeable and not received.flags.owndata


@pytest.mark.parametrize(
    "view",
    [
        lambda it: it[::2],
        lambda it: it[:, 1:4],
        lambda it: it.T,
        lambda it: it[::-1],
        lambda it: it[:, ::-2],
        lambda it: numpy.broadcast_to(it[0], (3, 8)),
        lambda it: it.reshape(2, 4, 8).transpose(2, 0, 1)[::3],
    ],
)
def test_strided_arrays_are_gathered(exchange, view):
    sent = view(numpy.arange(64, dtype="int32").reshape(8, 8))
    assert numpy.array_equal(numpy.asarray(exchange(sent).array), sent)


class OnlyDlpack:
    def __init__(self, inner, is_old):
        self.inner, self.is_old = inner, is_old

    def __dlpack_device__(self):
        return self.inner.__dlpack_device__()

    def __dlpack__(self, **options):
        if self.is_old and "max_version" in options:
            raise TypeError("unexpected keyword max_version")
        return self.inner.__dlpack__(**options)


class OnlyInterface:
    def __init__(self, inner):
        self.inner = inner
        self.__array_interface__ = inner.__array_interface__


@pytest.mark.parametrize("is_old", [False, True])
def test_arrays_by_dlpack(exchange, is_old):
    sent = numpy.arange(24, dtype="float32").reshape(4, 6)[:, ::2]
    assert numpy.array_equal(numpy.asarray(exchange(OnlyDlpack(sent, is_old)).array), sent)


def test_arrays_by_array_interface(exchange):
    sent = numpy.arange(24, dtype="<i8").reshape(4, 6)[::-1]
    assert numpy.array_equal(numpy.asarray(exchange(OnlyInterface(sent)).array), sent)


@pytest.mark.parametrize("sent", [b"bytes", bytearray(b"abc"), memoryview(b"view"), b""])
def test_bytes_are_messages_without_a_header(exchange, sent):
    sample = exchange(sent, metadata=b"from a camera")
    assert (sample.array.dtype, sample.array.shape) == ("uint8", (len(sent),))
    assert (sample.array.tobytes(), sample.metadata) == (bytes(sent), b"from a camera")


def test_arrays_of_the_standard_library(exchange):
    assert memoryview(exchange(array.array("d", [1.5, 2.5])).array).tolist() == [1.5, 2.5]
    rows = ((ctypes.c_int * 2) * 2)((1, 2), (3, 4))
    assert memoryview(exchange(rows).array).tolist() == [[1, 2], [3, 4]]


def test_samples_can_be_published_again(exchange):
    first = exchange(numpy.arange(6, dtype="uint16").reshape(2, 3))
    second = exchange(first.array)
    assert numpy.array_equal(numpy.asarray(second.array), numpy.arange(6).reshape(2, 3))


def test_other_objects_are_refused(exchange):
    for refused, exception, words in [
        (object(), TypeError, "is no array"),
        ("text", TypeError, "is no array"),
        ((ctypes.c_wchar * 3)(), ValueError, 'format "<u"'),
    ]:
        with pytest.raises(exception, match=words):
            exchange(refused)


def test_memory_stays_as_long_as_a_view(node, name):
    topic = node.topic(name, max_held=1, largest=4096)
    with topic.subscriber() as subscriber, topic.publisher() as publisher:
        publisher.publish(numpy.full(1024, 7, "uint8"))
        sample = subscriber.pull(timeout=10)
        view = numpy.asarray(sample.array)
        sample.release()
        with pytest.raises(errors.Closed, match="released"):
            sample.array
        for _ in range(10):
            publisher.publish(bytes(1024))
        with pytest.raises(errors.TooManySamples):
            subscriber.pull(timeout=0.1)
        assert (view == 7).all()
        del view
        gc.collect()
        assert subscriber.pull(timeout=10).array.tobytes() == bytes(1024)


def test_read_only_arrays_are_not_written(exchange):
    sample = exchange(numpy.arange(4, dtype="int32"))
    assert sample.array.readonly
    assert memoryview(sample.array).readonly
    with pytest.raises(ValueError):
        numpy.asarray(sample.array)[0] = 1
    with pytest.raises(BufferError, match="read-only"):
        sample.array.__dlpack__()
    copied = numpy.from_dlpack(sample.array, copy=True)
    copied[0] = 9
    assert numpy.asarray(sample.array)[0] == 0


def test_unconsumed_capsules_release_the_message(node, name):
    topic = node.topic(name, depth=1, max_held=1, largest=64)
    with topic.subscriber() as subscriber, topic.publisher() as publisher:
        publisher.publish(b"first")
        capsule = subscriber.pull(timeout=10).array.__dlpack__(max_version=(1, 0))
        publisher.publish(b"second", timeout=10)
        with pytest.raises(errors.TooManySamples):
            subscriber.pull(timeout=0.1)
        del capsule
        assert subscriber.pull(timeout=10).array.tobytes() == b"second"


def test_narrow_types_are_carried(node, name):
    topic = node.topic(name)
    with topic.subscriber() as subscriber, topic.publisher() as publisher:
        for dtype, bits in [("bfloat16", 16), ("float8_e4m3fn", 8), ("float4_e2m1fn", 4), ("int4", 4)]:
            with publisher.loan((3, 8), dtype) as loan:
                assert (loan.array.dtype, loan.array.nbytes) == (dtype, 3 * 8 * bits // 8)
                with pytest.raises(AttributeError, match="DLPack"):
                    loan.array.__array_interface__
            sample = subscriber.pull(timeout=10)
            assert (sample.array.dtype, sample.array.shape) == (dtype, (3, 8))
            again = publisher.publish(sample.array)
            assert again.subscribers == 1
            assert subscriber.pull(timeout=10).array.dtype == dtype


def test_torch_reads_in_place(exchange):
    torch = pytest.importorskip("torch")
    for dtype in [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.bool]:
        sent = torch.arange(12).reshape(3, 4).to(dtype)
        received = torch.from_dlpack(exchange(sent).array)
        assert received.dtype == dtype and torch.equal(received.view(torch.uint8), sent.view(torch.uint8))
    with pytest.raises(BufferError):
        exchange(torch.zeros(3, requires_grad=True))


HELD_PUBLISHER = """
import itertools, sys, time, fabricast
with fabricast.Node(sys.argv[1]) as node:
    publisher = node.topic("held", largest=4096, depth=2, max_held=8, release_deadline=0.5).publisher()
    print("ready", flush=True)
    publisher.wait_for_subscribers(1)
    for number in itertools.count(int(sys.argv[2]), 2):
        publisher.publish(bytes([number & 255]) * 4096)
        time.sleep(0.001)
"""


@contextlib.contextmanager
def held_publisher(directory, first=0):
    """A publisher of every second number, which serves the node if nobody does, until it is killed."""
    program = [sys.executable, "-c", HELD_PUBLISHER, directory, str(first)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_views_do_not_change_over_evictions_and_kills(tmp_path):
    directory = str(tmp_path)

    def compare(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for view, first in views:
                assert bytes(view) == first
            time.sleep(0.01)

    with contextlib.ExitStack() as publishers:
        first, second = (publishers.enter_context(held_publisher(directory, number)) for number in range(2))
        with fabricast.Node(directory, service="external") as node:
            topic = node.open("held")
            with topic.subscriber() as subscriber:
                kinds = [lambda it: it, memoryview, numpy.asarray, numpy.from_dlpack]
                with contextlib.suppress(ImportError):
                    import torch

                    kinds.append(lambda it: torch.from_dlpack(it).numpy())
                views = [(kind(subscriber.pull().array), None) for kind in kinds]
                views = [(view, bytes(view)) for view, _ in views]
                assert len({first for _, first in views}) == len(kinds)
                compare(1)
                with pytest.raises(errors.Evicted):
                    subscriber.pull()
                first.kill()
                compare(0.7)
                publishers.enter_context(held_publisher(directory))
                second.kill()
                compare(0.7)
            # The views outlive the subscriber, and a new one reads on.
            with topic.subscriber() as again:
                for _ in range(20):
                    assert len(set(bytes(again.pull().array))) == 1
            compare(0.1)
        compare(0.1)
