#!/usr/bin/env python3
"""hidden_tensors.py

Shared tensors and topics of two processes, each of which sees its own GPU only (CUDA_VISIBLE_DEVICES): tensors of each
allocator of PyTorch, and a topic on the GPU of its publisher, then of its subscriber. Every element is compared. Needs
two GPUs, PyTorch and the package fabricast.
"""

import contextlib
import multiprocessing
import os
import sys
import tempfile
import traceback

MEMORIES = ["plain", "expandable", "pool"]
LENGTH = 1 << 20
MESSAGES = 40


def numbers(first):
    import torch

    return torch.arange(first, first + LENGTH, dtype=torch.float32, device="cuda")


def check(tensor, expected):
    import torch

    assert tensor.device == torch.device("cuda:0"), tensor.device
    assert torch.equal(tensor, expected), f"{int((tensor != expected).sum())} elements differ"


def owner(connection, directory, memory):
    """Shares a tensor twice, which the other process overwrites."""
    import torch

    import fabricast
    import fabricast.torch

    with fabricast.torch.pool() if memory == "pool" else contextlib.nullcontext():
        tensor = numbers(1).clone()
    torch.cuda.synchronize()
    connection.send(fabricast.torch.token(tensor, directory=directory))
    assert connection.recv() == "written"
    check(tensor, numbers(2))
    shared = fabricast.share(tensor, directory=directory)
    connection.send(shared.token)
    assert connection.recv() == "written"
    check(tensor, numbers(3))
    shared.close()


def user(connection, directory, memory):
    import torch

    import fabricast
    import fabricast.torch

    def overwrite(tensor, first):
        check(tensor, numbers(first))
        tensor.copy_(numbers(first + 1))
        torch.cuda.synchronize()
        connection.send("written")

    overwrite(fabricast.torch.load(connection.recv(), directory=directory), 1)
    array = fabricast.open(connection.recv(), directory=directory)
    overwrite(torch.from_dlpack(array), 2)
    try:
        fabricast.share(array, directory=directory)
    except fabricast.errors.Error as error:
        # Memory of the runtime is refused by the driver, which does not tell its device.
        assert memory == "plain" or "does not see" in str(error), error


def open_topic(node, creates):
    topic = node.topic("tensors", memory="cuda:0", largest=1 << 24) if creates else node.open("tensors")
    expected = "cuda:0" if creates else "GPU-"
    assert topic.memory.startswith(expected), topic.memory
    return topic


def publisher(connection, directory, creates):
    import torch

    import fabricast

    with fabricast.Node(directory) as node:
        connection.send("joined")
        with open_topic(node, creates).publisher() as topic:
            topic.wait_for_subscribers()
            stream = torch.cuda.Stream()
            for number in range(MESSAGES):
                kind = number % 3
                if kind == 0:
                    topic.publish(numbers(number))
                elif kind == 1:
                    topic.publish(numbers(number).cpu())
                else:
                    # In the order of a stream, which writes it in place.
                    with topic.loan((LENGTH,), torch.float32) as loan, torch.cuda.stream(stream):
                        torch.from_dlpack(loan.array).copy_(numbers(number))
            assert connection.recv() == "read"


def subscriber(connection, directory, creates):
    import torch

    import fabricast

    with fabricast.Node(directory) as node:
        connection.send("joined")
        with open_topic(node, creates).subscriber() as topic:
            # Held samples let the pool grow.
            held = []
            for number in range(MESSAGES):
                sample = topic.pull()
                received = torch.from_dlpack(sample.array)
                check(received, numbers(number))
                del received
                held = [*held, sample][-6:]
            for sample in held:
                sample.release()
            connection.send("read")


def _child(role, connection, *arguments):
    try:
        role(connection, *arguments)
        connection.send("end")
    except BaseException:
        traceback.print_exc()
        connection.send("failed")
        raise


class Child:
    """A process that runs a function and sees this GPU only."""

    def __init__(self, gpu, role, *arguments):
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_child, args=(role, there, *arguments))
        self.process.start()
        there.close()

    def receive(self):
        if not self.connection.poll(120):
            raise TimeoutError(f"process {self.process.pid} does not answer")
        return self.connection.recv()

    def finish(self):
        assert self.receive() == "end"
        self.process.join(60)
        assert self.process.exitcode == 0, self.process.exitcode


def share(memory):
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{memory == 'expandable'}"
    with tempfile.TemporaryDirectory() as directory:
        of_owner, of_user = Child(0, owner, directory, memory), Child(1, user, directory, memory)
        for _ in range(2):
            of_user.connection.send(of_owner.receive())
            of_owner.connection.send(of_user.receive())
        of_user.finish()
        of_owner.finish()


def topic(publisher_creates, publisher_joins_first):
    with tempfile.TemporaryDirectory() as directory:
        roles = [(0, publisher, publisher_creates), (1, subscriber, not publisher_creates)]
        children = {}
        for gpu, role, creates in roles if publisher_joins_first else roles[::-1]:
            children[role] = Child(gpu, role, directory, creates)
            assert children[role].receive() == "joined"
        children[publisher].connection.send(children[subscriber].receive())
        children[subscriber].finish()
        children[publisher].finish()


def main():
    for memory in MEMORIES:
        share(memory)
        print(f"shared tensors of memory {memory}: all elements right", flush=True)
    for publisher_creates in (True, False):
        for publisher_joins_first in (True, False):
            topic(publisher_creates, publisher_joins_first)
            creator = "publisher" if publisher_creates else "subscriber"
            first = "publisher" if publisher_joins_first else "subscriber"
            print(f"topic on the GPU of its {creator}, {first} joined first: all elements right", flush=True)


if __name__ == "__main__":
    sys.exit(main())
