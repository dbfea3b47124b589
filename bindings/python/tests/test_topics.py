"""Nodes, topics, publishers and subscribers."""

import asyncio
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import fabricast
import pytest
from fabricast import errors

DEADLINE = 30


def test_typed_topics_check_type_and_shape(node, name):
    topic = node.topic(name, dtype="float32", shape=(2, 3))
    assert (topic.type_name, topic.largest) == ("float32[2,3]", 24)
    with topic.publisher() as publisher, topic.subscriber() as subscriber:
        with pytest.raises(ValueError, match=r"uint8\[5\], but the messages of the topic are float32\[2,3\]"):
            publisher.publish(b"bytes")
        with publisher.loan() as loan:
            memoryview(loan.array).cast("B")[:] = bytes(range(24))
        sample = subscriber.pull(timeout=DEADLINE)
        assert (sample.array.dtype, sample.array.shape) == ("float32", (2, 3))
        assert (sample.array.tobytes(), sample.metadata) == (bytes(range(24)), b"")
    with pytest.raises(errors.SettingsDiffer, match="type"):
        node.topic(name, dtype="float64", shape=(2, 3))
    assert node.open(name).type_name == "float32[2,3]"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float33", "shape": (1,)}, "dtype='float33': NumPy and PyTorch have no such type"),
        ({"shape": (1,)}, "shape needs dtype"),
        ({"dtype": "int8", "shape": (1,) * 17}, "at most 16 dimensions"),
        ({"dtype": "int8", "shape": (1 << 62, 4)}, "at most 16 dimensions"),
        ({"memory": "disk"}, '"disk" is not like host'),
        ({"reliability": "maybe"}, '"maybe" is not reliable'),
        ({"release_deadline": -1.0}, "at least 0 seconds"),
    ],
)
def test_invalid_settings(node, name, options, words):
    with pytest.raises(ValueError, match=words):
        node.topic(name, **options)


def test_errors_have_kinds_and_the_operation(node, name):
    with pytest.raises(errors.NotFound, match=name) as caught:
        node.open(name, timeout=0.1)
    assert isinstance(caught.value, LookupError) and caught.value.operation
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.operation) == (errors.NotFoundInTime, str(caught.value), caught.value.operation)
    subscriber = node.topic(name).subscriber()
    with pytest.raises(BlockingIOError):
        subscriber.pull(timeout=0)
    with pytest.raises(TimeoutError, match="within 0.1 s"):
        subscriber.pull(timeout=0.1)
    with pytest.raises(ValueError, match="timeout=-1"):
        subscriber.pull(timeout=-1)
    assert subscriber.try_pull() is None
    publisher = node.open(name).publisher()
    with pytest.raises(errors.TooLong):
        publisher.publish(bytes((1 << 20) + 1))
    with pytest.raises(ValueError, match="257 bytes of metadata"):
        publisher.publish(b"", metadata=bytes(257))
    publisher.close()
    with pytest.raises(errors.Closed):
        publisher.publish(b"")


def test_loans_are_published_or_given_back(node, name):
    topic = node.topic(name)
    with topic.publisher() as publisher, topic.subscriber() as subscriber:
        loan = publisher.loan((4,), "uint8")
        with memoryview(loan.array) as view:
            view[:] = b"abcd"
        loan.publish(metadata=b"letters")
        sample = subscriber.pull(timeout=DEADLINE)
        assert (sample.array.tobytes(), sample.metadata) == (b"abcd", b"letters")
        with pytest.raises(errors.Closed):
            loan.publish()
        with pytest.raises(KeyError):
            with publisher.loan((4,), "uint8"):
                raise KeyError
        assert subscriber.try_pull() is None
        loans = [publisher.loan((1,), "uint8") for _ in range(4)]
        with pytest.raises(errors.TooManyLoans):
            publisher.loan((1,), "uint8")
        loans.pop().discard()
        publisher.loan((1,), "uint8").discard()


def test_subscribers_are_iterators(node, name):
    topic = node.topic(name)
    with topic.publisher() as publisher, topic.subscriber() as subscriber:
        for number in range(5):
            publisher.publish(bytes([number]))
        numbers = []
        for sample in subscriber:
            numbers.append(sample.array.tobytes()[0])
            if len(numbers) == 5:
                subscriber.close()
        assert numbers == [0, 1, 2, 3, 4]


def test_subscribers_are_asynchronous_iterators(node, name):
    topic = node.topic(name)

    async def read(subscriber):
        return [sample.sequence async for sample in take(subscriber, 100)]

    async def take(subscriber, count):
        async for sample in subscriber:
            yield sample
            count -= 1
            if count == 0:
                return

    async def run():
        with topic.subscriber() as one, topic.subscriber() as other, topic.publisher() as publisher:
            readers = [asyncio.create_task(read(subscriber)) for subscriber in (one, other)]
            for number in range(100):
                while True:
                    try:
                        publisher.publish(b"", timeout=0)
                        break
                    except BlockingIOError:
                        await asyncio.sleep(0)
                if number % 7 == 0:
                    await asyncio.sleep(0.001)
            return await asyncio.wait_for(asyncio.gather(*readers), DEADLINE)

    assert asyncio.run(run()) == [list(range(1, 101))] * 2


def test_other_threads_run_during_waits(node, name):
    topic = node.topic(name)
    with topic.publisher() as publisher, topic.subscriber() as subscriber:
        samples = []
        thread = threading.Thread(target=lambda: samples.append(subscriber.pull(timeout=DEADLINE)))
        thread.start()
        time.sleep(0.2)
        assert thread.is_alive()
        publisher.publish(b"now")
        thread.join(DEADLINE)
        assert samples[0].array.tobytes() == b"now"


def test_lost_messages_are_counted(node, name):
    topic = node.topic(name, reliability="drop-oldest", depth=2)
    with topic.publisher() as publisher, topic.subscriber() as subscriber:
        for number in range(5):
            publisher.publish(bytes([number]))
        assert [subscriber.pull(timeout=DEADLINE).array.tobytes()[0] for _ in range(2)] == [3, 4]
        assert subscriber.missed == 3
        assert subscriber.poll_event() == {"event": "gap", "missed": 3}
        assert subscriber.poll_event() is None


def test_reports(node, name):
    topic = node.topic(name)
    rows = fabricast.report(node)
    assert topic.name in str(rows) and isinstance(rows, list)


def test_messages_in_memory_of_a_device(node, name):
    topic = node.topic(name, dtype="int16", shape=(2, 2), memory="emulated:1")
    with topic.publisher() as publisher, topic.subscriber() as subscriber:
        with publisher.loan() as loan:
            assert loan.array.device == "emulated:1"
            memoryview(loan.array).cast("B")[:] = bytes(8)
        publisher.publish(memoryview(bytes(range(8))).cast("h", (2, 2)))
        assert subscriber.pull(timeout=DEADLINE).array.tobytes() == bytes(8)
        sample = subscriber.pull(timeout=DEADLINE)
        assert sample.array.device == "emulated:1"
        assert sample.array.__dlpack_device__() == (1, 0)
        assert memoryview(sample.array).tolist() == [[0x0100, 0x0302], [0x0504, 0x0706]]


INTERRUPTED = """
import sys, fabricast
node = fabricast.Node(sys.argv[1], label="waits")
topic = node.topic("quiet", depth=1, largest=64)
subscriber, publisher = topic.subscriber(), topic.publisher()
publisher.publish(b"full")
print("ready", flush=True)
try:
    {}
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    "wait",
    [
        "topic.subscriber().pull(timeout=None)",
        "next(topic.subscriber())",
        "publisher.publish(b'more', timeout=None)",
        "publisher.wait_for_subscribers(7, timeout=None)",
        "node.open('absent', timeout=None)",
    ],
)
def test_control_c_ends_every_wait(tmp_path, wait):
    program = [sys.executable, "-c", INTERRUPTED.format(wait), str(tmp_path)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    out, _ = process.communicate(timeout=DEADLINE)
    assert (out, process.returncode) == ("interrupted\n", 0)
    assert time.monotonic() - begin < 5


READER = """
import sys, fabricast
with fabricast.Node(sys.argv[1]) as node:
    subscriber = node.open("between").subscriber()
    print("ready", flush=True)
    for sample in subscriber:
        values = memoryview(sample.array)
        print(values.format, values.shape, sum(values.tolist()), flush=True)
        if values.shape == (0,):
            break
"""


def test_arrays_between_processes(node):
    import array

    program = [sys.executable, "-c", READER, str(node.directory)]
    topic = node.topic("between")
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    with topic.publisher() as publisher:
        publisher.publish(array.array("q", range(1000)))
        publisher.publish(array.array("d", [0.5, 0.25]))
        publisher.publish(array.array("q"))
    out, _ = process.communicate(timeout=DEADLINE)
    assert out.splitlines() == ["q (1000,) 499500", "d (2,) 0.75", "q (0,) 0"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_children_of_a_fork_get_an_error(node, name):
    topic = node.topic(name)
    subscriber, publisher = topic.subscriber(), topic.publisher()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        outcomes = []
        for call in (lambda: publisher.publish(b"x"), lambda: subscriber.pull(timeout=1), lambda: node.topic("new")):
            try:
                call()
                outcomes.append("none")
            except errors.Error as error:
                outcomes.append(type(error).__name__)
        os.write(writing, " ".join(outcomes).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "Forked Forked Forked"
    os.waitpid(child, 0)
    publisher.publish(b"parent")
    assert subscriber.pull(timeout=DEADLINE).array.tobytes() == b"parent"


def test_import_is_quiet():
    # Time of the processor: other programs do not change it.
    program = (
        "import signal, sys, threading, time\n"
        "before = [signal.getsignal(number) for number in signal.valid_signals()]\n"
        "begin = time.process_time()\n"
        "import fabricast\n"
        "took = time.process_time() - begin\n"
        "assert before == [signal.getsignal(number) for number in signal.valid_signals()]\n"
        "assert len(__import__('os').listdir('/proc/self/task')) == 1\n"
        "assert not {'numpy', 'torch', 'asyncio'} & set(sys.modules)\n"
        "print(took)\n"
    )
    run = lambda: float(subprocess.check_output([sys.executable, "-c", program], text=True))
    assert min(run() for _ in range(5)) < 0.05


def test_a_subscriber_is_closed_while_another_thread_waits(node, name):
    subscriber = node.topic(name).subscriber()
    failures = []

    def wait():
        try:
            subscriber.pull(timeout=None)
        except errors.Closed as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    begin = time.monotonic()
    subscriber.close()
    thread.join(DEADLINE)
    assert failures and time.monotonic() - begin < 1


def failures_of(*calls):
    """The errors of calls, each in a thread, that something ends after 0.2 s."""
    failures = [None] * len(calls)

    def run(number, call):
        try:
            call()
        except fabricast.errors.Error as error:
            failures[number] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    begin = time.monotonic()
    yield
    for thread in threads:
        thread.join(DEADLINE)
    assert time.monotonic() - begin < 1
    yield failures


@pytest.mark.parametrize("closed", ["node", "topic", "objects"])
def test_close_ends_what_hangs_on_it_and_waits_of_other_threads(tmp_path, closed):
    node = fabricast.Node(tmp_path)
    topic = node.topic("numbers", depth=1)
    publisher, reader, idle = topic.publisher(), topic.subscriber(), topic.subscriber()
    publisher.publish(b"held")
    sample = reader.pull(timeout=DEADLINE)
    waits = failures_of(
        lambda: reader.pull(timeout=None),
        lambda: publisher.publish(b"more", timeout=None),
        lambda: publisher.wait_for_subscribers(9, timeout=None),
    )
    next(waits)
    if closed == "objects":
        reader.close()
        publisher.close()
    else:
        {"node": node, "topic": topic}[closed].close()
    for error in next(waits):
        assert isinstance(error, errors.Closed), error
        assert {"node": str(tmp_path), "topic": "the topic was closed", "objects": "was closed"}[closed] in str(error)
    if closed != "objects":
        # The message that it has not read is given up.
        for call in (idle.try_pull, idle.pull, lambda: publisher.publish(b"late"), lambda: publisher.loan((1,), "uint8"), topic.subscriber):
            with pytest.raises(errors.Closed):
                call()
        assert list(idle) == []
    assert sample.array.tobytes() == b"held" and sample.is_valid


def test_closed_node_does_not_block_publishers_of_others(tmp_path):
    with fabricast.Node(tmp_path) as node:
        publisher = node.topic("numbers", depth=2, release_deadline=600.0).publisher()
        other = fabricast.Node(tmp_path)
        subscriber = other.open("numbers").subscriber()
        for _ in range(2):
            publisher.publish(b"unread")
        with pytest.raises(BlockingIOError):
            publisher.publish(b"more", timeout=0)
        other.close()
        publisher.publish(b"more", timeout=DEADLINE)
        assert publisher.subscribers == 0
        with pytest.raises(errors.Closed, match="the node .* was closed"):
            subscriber.pull()


def start_publisher(directory, count):
    """A process that publishes so many messages to "numbers", prints a line, and waits."""
    program = (
        "import sys, fabricast\n"
        "node = fabricast.Node(sys.argv[1], label='camera')\n"
        "publisher = node.open('numbers').publisher()\n"
        "for number in range(int(sys.argv[2])):\n"
        "    publisher.publish(bytes([number]))\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(directory), str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline()
    return process


def numbers(samples):
    return [sample.array.tobytes()[0] for sample in samples]


@pytest.mark.parametrize("how", ["iterator", "pull", "asyncio"])
def test_iterations_end_when_the_last_publisher_was_killed(tmp_path, how):
    with fabricast.Node(tmp_path) as node:
        topic = node.topic("numbers")
        subscriber = topic.subscriber()
        with pytest.raises(BlockingIOError):
            subscriber.pull(timeout=0, until_end=True)
        assert topic.publishers() == []
        process = start_publisher(tmp_path, 3)
        assert subscriber.wait_for_publishers(timeout=DEADLINE) == 1
        [found] = topic.publishers()
        assert (found.label, found.process, found.node, found.is_alive) == ("camera", process.pid, None, True)
        assert found.publisher == subscriber.publishers()[0].publisher
        begin = time.monotonic()
        killer = threading.Timer(0.2, process.kill)
        killer.start()

        def pull():
            while True:
                try:
                    yield subscriber.pull(until_end=True)
                except errors.NoPublishers:
                    return

        async def read():
            return numbers([sample async for sample in subscriber.until_end()])

        match how:
            case "iterator":
                assert numbers(subscriber.until_end()) == [0, 1, 2]
            case "pull":
                assert numbers(pull()) == [0, 1, 2]
            case "asyncio":
                assert asyncio.run(asyncio.wait_for(read(), DEADLINE)) == [0, 1, 2]
        assert 0.1 < time.monotonic() - begin < 5
        events = [event["event"] for event in iter(subscriber.poll_event, None)]
        assert events == ["publisher-lost", "no-publishers"]
        # It does not end otherwise.
        with pytest.raises(errors.DeadlineExceeded):
            subscriber.pull(timeout=0.01)
        process.wait()


def test_publishers_are_told_when_the_last_subscriber_has_gone(node, name):
    topic = node.topic(name)
    with topic.publisher() as publisher:
        publisher.wait_for_no_subscribers(timeout=0)
        assert publisher.poll_event() is None
        subscriber = topic.subscriber()
        with pytest.raises(errors.DeadlineExceeded):
            publisher.wait_for_no_subscribers(timeout=0.05)
        threading.Timer(0.1, subscriber.close).start()
        publisher.wait_for_no_subscribers(timeout=DEADLINE)
        assert publisher.poll_event() == {"event": "no-subscribers"}
        assert publisher.poll_event() is None


def programs_of(page):
    """The programs of a page, by their order."""
    import pathlib
    import re

    text = (pathlib.Path(__file__).parents[3] / "docs" / page).read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_tutorial_runs_as_written(tmp_path):
    pytest.importorskip("numpy")
    camera, viewer = programs_of("tutorial/first-array.md")
    run = lambda program: subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    processes = [run(camera), run(viewer)]
    out = [process.communicate(timeout=DEADLINE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    lines = out[1].splitlines()
    assert (len(lines), lines[-1]) == (100, "100 (480, 640, 3) 99.0")


@pytest.mark.parametrize("waiting", ["adaptive", "busy", "block"])
def test_waiting(tmp_path, waiting):
    with fabricast.Node(tmp_path, waiting=waiting) as node:
        topic = node.topic("numbers")
        subscriber = topic.subscriber()
        with pytest.raises(errors.DeadlineExceeded):
            subscriber.pull(timeout=0.01)
        topic.publisher().publish(b"abc")
        assert bytes(subscriber.pull().array) == b"abc"


def test_waiting_is_checked(tmp_path):
    with pytest.raises(errors.InvalidArgument, match="adaptive, busy or block"):
        fabricast.Node(tmp_path, waiting="spin")


def test_a_loan_can_be_published_again_when_there_was_no_room(node, name):
    topic = node.topic(name, depth=1)
    with topic.publisher() as publisher, topic.subscriber() as subscriber:
        publisher.publish(b"first")
        loan = publisher.loan((6,), "uint8")
        memoryview(loan.array)[:] = b"second"
        with pytest.raises(errors.DeadlineExceeded, match="the topic is full"):
            loan.publish(timeout=0.05)
        assert subscriber.pull(timeout=DEADLINE).array.tobytes() == b"first"
        loan.publish(timeout=DEADLINE)
        assert subscriber.pull(timeout=DEADLINE).array.tobytes() == b"second"
        with pytest.raises(errors.Closed):
            loan.publish()


def test_several_tasks_wait_in_a_subscriber_until_it_is_closed(node, name):
    topic = node.topic(name)
    publisher, subscriber = topic.publisher(), topic.subscriber()

    async def read(found):
        async for sample in subscriber:
            found.append(sample.array.tobytes())

    async def run():
        found = []
        tasks = [asyncio.create_task(read(found)) for _ in range(3)]
        await asyncio.sleep(0.1)
        tasks[0].cancel()
        for number in range(5):
            publisher.publish(bytes([number]))
            await asyncio.sleep(0.01)
        while len(found) < 5:
            await asyncio.sleep(0.01)
        subscriber.close()
        await asyncio.wait_for(asyncio.gather(*tasks[1:]), DEADLINE)
        return found

    assert sorted(asyncio.run(asyncio.wait_for(run(), DEADLINE))) == [bytes([number]) for number in range(5)]


def test_signatures_have_their_defaults():
    for method in (fabricast.Publisher.publish, fabricast.Subscriber.pull, fabricast.Loan.publish, fabricast.open):
        assert inspect.signature(method).parameters["timeout"].default == 30.0, method


def test_network_that_cannot_take_effect_is_refused(tmp_path):
    for network, error, text in (
        ({"listen": "127.0.0.1:0"}, errors.InvalidArgument, "not authenticated .* Set insecure"),
        ({"peers": ["node2:7700"]}, errors.InvalidArgument, "Set insecure"),
        ({"listen": "127.0.0.1:0", "insecure": True, "provider": "bogus"}, errors.NoProvider, "bogus|libfabric"),
        ({"provider": "net"}, errors.InvalidArgument, "provider has no effect without listen"),
        ({"source": "127.0.0.1"}, errors.InvalidArgument, "source has no effect without listen"),
    ):
        with pytest.raises(error, match=text):
            fabricast.Node(str(tmp_path / "node"), **network)
