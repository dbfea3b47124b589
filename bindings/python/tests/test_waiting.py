"""Waits for several subscribers, and in event loops; arguments of topics and nodes; the package."""

import asyncio
import builtins
import inspect
import os
import pathlib
import subprocess
import sys
import threading
import time

import fabricast
import numpy
import pytest
from fabricast import errors

DEADLINE = 20


def test_a_wait_returns_the_subscribers_with_messages(node, name):
    topics = [node.topic(f"{name}-{number}") for number in range(3)]
    subscribers = [topic.subscriber() for topic in topics]
    publishers = [topic.publisher() for topic in topics]
    assert fabricast.wait(subscribers, 0) == fabricast.wait([], 0) == []
    began = time.monotonic()
    assert fabricast.wait(subscribers, timeout=0.05) == []
    assert 0.04 < time.monotonic() - began < 5
    publishers[2].publish(b"2")
    assert fabricast.wait(subscribers, DEADLINE) == [subscribers[2]]
    publishers[0].publish(b"0")
    assert fabricast.wait(subscribers, DEADLINE) == [subscribers[0], subscribers[2]]
    for number in (0, 2):
        assert subscribers[number].pull(DEADLINE).array.tobytes() == b"%d" % number
    # A message is seen at once, without the thread that makes descriptors readable.
    for number in range(100):
        publishers[number % 3].publish(b"again")
        assert subscribers[number % 3] in fabricast.wait(subscribers, 0)
        assert subscribers[number % 3].pull(0).array.tobytes() == b"again"
    # Nothing is left to look at, however many messages there were.
    assert fabricast.wait(subscribers, 0) == fabricast.wait(iter(subscribers), 0.05) == []
    with pytest.raises(TypeError, match=r"\[subscriber\]"):
        fabricast.wait(subscribers[0], 0)
    threading.Timer(0.1, lambda: publishers[1].publish(b"1")).start()
    ready = []
    while not ready:
        ready = [it for it in fabricast.wait(subscribers, DEADLINE) if it.try_pull() is not None]
    assert ready == [subscribers[1]]
    subscribers[1].close()
    with pytest.raises(errors.Closed):
        fabricast.wait(subscribers, 0)


def test_timeouts_are_positional_and_timeout_errors(node, name):
    topic = node.topic(name, depth=1, max_held=1, largest=8)
    with topic.subscriber() as subscriber, topic.publisher() as publisher:
        for timeout in (0, 0.01):
            with pytest.raises(TimeoutError):
                subscriber.pull(timeout)
        with pytest.raises(errors.WouldBlock):
            subscriber.pull(timeout=0)
        publisher.wait_for_subscribers(1, DEADLINE)
        with pytest.raises(TimeoutError):
            publisher.wait_for_no_subscribers(0.01)
        publisher.publish(b"1")
        with pytest.raises(TimeoutError):
            publisher.publish(b"2", timeout=0)
        with pytest.raises(ValueError, match="at least 0 seconds"):
            subscriber.pull(-1)
    with pytest.raises(TimeoutError):
        node.open("missing", 0.01)


def test_topics_have_a_type_without_a_shape(node, name):
    topic = node.topic(name, dtype="float32", largest=4096)
    assert (topic.type_name, topic.largest) == ("float32[...]", 4096)
    assert node.open(name).type_name == "float32[...]"
    with topic.subscriber() as subscriber, topic.publisher() as publisher:
        for shape in [(3,), (2, 4), (), (0, 5)]:
            publisher.publish(numpy.full(shape, 2, "float32"), metadata=b"meta")
            with publisher.loan(shape) as loan:
                loan.array[...] = 3
            for value in (2, 3):
                sample = subscriber.pull(DEADLINE)
                assert sample.array.shape == shape and (sample.array == value).all()
        for refused in (numpy.zeros(3), b"bytes"):
            with pytest.raises(errors.InvalidArgument, match=r"the topic are float32\[\.\.\.\]"):
                publisher.publish(refused)
        with pytest.raises(errors.InvalidArgument, match="no shape"):
            publisher.loan()
        with pytest.raises(errors.TooLong):
            publisher.publish(numpy.zeros(1025, "float32"))
    with pytest.raises(errors.SettingsDiffer):
        node.topic(name, dtype="float32", shape=3, largest=4096)


def test_budgets_limit_topics(tmp_path, name):
    with fabricast.Node(tmp_path, budget_host=1 << 20) as node:
        node.topic(f"{name}-small", largest=1024)
        with pytest.raises(MemoryError):
            node.topic(f"{name}-large", largest=1 << 20)
    with pytest.raises(errors.InvalidArgument, match="budget of 5 bytes"):
        fabricast.Node(tmp_path / "other", budget_host=5)


def test_messages_in_event_loops(node, name):
    topic = node.topic(name, depth=2, largest=64)

    async def run():
        with topic.subscriber() as subscriber, topic.publisher() as publisher:
            with pytest.raises(errors.DeadlineExceeded, match="no message within 0.05 s"):
                await subscriber.pull_async(0.05)
            waits = asyncio.create_task(subscriber.pull_async(DEADLINE))
            await asyncio.sleep(0.05)
            sent = await publisher.publish_async(b"first", metadata=b"meta")
            assert sent.subscribers == 1
            sample = await waits
            assert (sample.array.tobytes(), sample.metadata) == (b"first", b"meta")
            del sample
            loan = await publisher.loan_async(6, "uint8")
            loan.array[...] = list(b"second")
            await loan.publish_async(metadata=b"2")
            await publisher.publish_async(b"third")
            # There is no room: the task waits, and others run.
            waits = asyncio.create_task(publisher.publish_async(b"fourth", timeout=DEADLINE))
            with pytest.raises(errors.DeadlineExceeded):
                await publisher.publish_async(b"late", timeout=0.02)
            cancelled = asyncio.create_task(publisher.publish_async(b"cancelled"))
            await asyncio.sleep(0.02)
            cancelled.cancel()
            assert not waits.done()
            received = [(await subscriber.pull_async()).array.tobytes()]
            await waits
            received += [(await subscriber.pull_async()).array.tobytes() for _ in range(2)]
            assert received == [b"second", b"third", b"fourth"]
            cancelled = asyncio.create_task(subscriber.pull_async())
            await asyncio.sleep(0.01)
            cancelled.cancel()
            await publisher.publish_async(b"last")
            assert (await subscriber.pull_async()).array.tobytes() == b"last"
            # The copy of a loan with a view is made once, and announced once.
            await publisher.publish_async(b"one")
            await publisher.publish_async(b"two")
            loan = await publisher.loan_async(3, "uint8")
            view = memoryview(loan.array)
            view[:] = b"old"
            with pytest.warns(errors.CopyWarning) as caught:
                waits = asyncio.create_task(loan.publish_async(timeout=DEADLINE))
                await asyncio.sleep(0.1)
                view[:] = b"new"
                assert [(await subscriber.pull_async()).array.tobytes() for _ in range(3)] == [b"one", b"two", b"old"]
                await waits
            assert len(caught) == 1
            with pytest.raises(errors.Closed):
                loan.array
            publisher.close()
            with pytest.raises(errors.NoPublishers):
                await subscriber.pull_async(until_end=True)
            with pytest.raises(errors.Closed):
                await publisher.publish_async(b"closed")

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_calls_that_publish_wait_for_the_loans_of_each_other(node, name):
    topic = node.topic(name, depth=2, largest=64, loans=2)
    with topic.subscriber() as subscriber, topic.publisher() as publisher:
        threads = [threading.Thread(target=publisher.publish, args=(bytes([number]),)) for number in range(12)]
        for thread in threads:
            thread.start()
        assert sorted(subscriber.pull(DEADLINE).array.tobytes() for _ in range(12)) == [bytes([it]) for it in range(12)]
        for thread in threads:
            thread.join()

        async def run():
            tasks = [asyncio.create_task(publisher.publish_async(bytes([number]))) for number in range(12)]
            received = [(await subscriber.pull_async(DEADLINE)).array.tobytes() for _ in range(12)]
            assert sorted(received) == [bytes([it]) for it in range(12)]
            assert all(sent.subscribers == 1 for sent in await asyncio.gather(*tasks))

        asyncio.run(run())
        # Those of the program itself are not waited for, however many calls need one.
        loans = [publisher.loan(1, "uint8") for _ in range(2)]
        failures = []

        def refused():
            with pytest.raises(errors.TooManyLoans) as failure:
                publisher.publish(b"more", timeout=None)
            failures.append(failure)

        threads = [threading.Thread(target=refused) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        assert len(failures) == 4
        del loans


def test_an_import_of_all_names_leaves_those_of_python():
    names = {}
    exec("from fabricast import *", names)
    assert names.get("open", builtins.open) is builtins.open and names["share"] is fabricast.share
    assert not set(fabricast.__all__) & set(dir(builtins))


def test_signatures_are_those_of_the_stubs():
    for function in (fabricast.share, fabricast.open, fabricast.wait):
        assert all(it.annotation is not inspect.Parameter.empty for it in inspect.signature(function).parameters.values())


@pytest.mark.parametrize("command", [[sys.executable, "-m", "fabricast"], [os.path.join(os.path.dirname(sys.executable), "fabricast")]])
def test_the_package_has_the_command(command):
    if not pathlib.Path(fabricast.__file__).with_name("_bin").exists():
        pytest.skip("this wheel was packed without the command")
    if not os.path.exists(command[0]):
        pytest.skip("the scripts of the package are not installed beside Python")
    found = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.startswith(f"fabricast {fabricast.__version__}")
    failed = subprocess.run([*command, "topics", "--no-such-option"], capture_output=True, text=True, timeout=60)
    assert failed.returncode == 2 and "fabricast topics" in failed.stderr


def test_everything_that_closes_is_a_context(node, name):
    topic = node.topic(name)
    with topic, topic.publisher() as publisher, topic.subscriber() as subscriber:
        publisher.publish(b"message")
        with subscriber.pull() as sample, publisher.loan(3, "uint8"):
            assert sample.array.tobytes() == b"message"
    with fabricast.Agent("one") as agent, agent.register(fabricast.allocate(64), read=True) as region:
        assert region.descriptor
    for kind in vars(fabricast).values():
        if isinstance(kind, type) and hasattr(kind, "close"):
            assert hasattr(kind, "__enter__") and hasattr(kind, "__exit__"), kind
