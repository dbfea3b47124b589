"""Agents of NIXL with the backend FABRICAST, in this process and in others, for the tests."""

import multiprocessing
import time

import numpy
from nixl._api import nixl_agent, nixl_agent_config

BACKEND = "FABRICAST"
# The longest wait for anything; every wait of a test ends with it.
DEADLINE = 30


def start_agent(name, parameters=None, **config):
    agent = nixl_agent(name, nixl_agent_config(backends=[], **config))
    agent.create_backend(BACKEND, parameters or {})
    return agent


def until(found, what):
    """Calls a function until it returns something true, and returns that."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        result = found()
        if result:
            return result
        time.sleep(0.0005)
    raise AssertionError(f"{what} did not happen within {DEADLINE} s")


class Notifications:
    """The notifications that an agent received, by sender."""

    def __init__(self, agent):
        self.agent = agent
        self.received = {}

    def poll(self):
        for sender, messages in self.agent.get_new_notifs().items():
            self.received.setdefault(sender, []).extend(messages)
        return self.received

    def take(self, sender, count=1):
        """The next notifications of a sender."""
        until(lambda: len(self.poll().get(sender, [])) >= count, f"{count} notifications of {sender}")
        messages = self.received[sender]
        taken, self.received[sender] = messages[:count], messages[count:]
        return taken


class Memory:
    """Registered host memory of an agent."""

    def __init__(self, agent, size, fill=0):
        self.bytes = numpy.full(size, fill, dtype=numpy.uint8)
        self.address = self.bytes.ctypes.data
        self.agent = agent
        self.registered = agent.register_memory([(self.address, size, 0, "")], "DRAM")

    def deregister(self):
        self.agent.deregister_memory(self.registered)


def pattern(size, seed):
    """Bytes that depend on their place and on a seed."""
    return numpy.random.default_rng(seed).integers(0, 256, size, dtype=numpy.uint8)


def descriptors(agent, address, blocks):
    return agent.get_xfer_descs([(address + start, length, 0) for start, length in blocks], "DRAM")


def complete(agent, handle):
    """Waits for a posted transfer, and returns DONE, or the exception of its failure."""
    return until(lambda: (state := agent.check_xfer_state(handle)) != "PROC" and state, "a transfer")


def transfer(agent, operation, local, remote, name, message=b""):
    """Transfers between lists of (address, length)."""
    here = agent.get_xfer_descs([(address, length, 0) for address, length in local], "DRAM")
    there = agent.get_xfer_descs([(address, length, 0) for address, length in remote], "DRAM")
    handle = agent.initialize_xfer(operation, here, there, name, message)
    try:
        state = agent.transfer(handle)
        if state == "PROC":
            state = complete(agent, handle)
        assert state == "DONE", state
    finally:
        agent.release_xfer_handle(handle)


def _serve(commands, name, parameters, config):
    agent = start_agent(name, parameters, **config)
    notifications, memories = Notifications(agent), []

    def register(size, fill):
        memories.append(Memory(agent, size, fill))
        return memories[-1].address

    def when(sender, count, index):
        """Waits for notifications, and returns them with the memory as it is then."""
        messages = notifications.take(sender, count)
        return messages, memories[index].bytes.tobytes() if index is not None else None

    calls = {
        "metadata": agent.get_agent_metadata,
        "register": register,
        "deregister": lambda index: memories.pop(index).deregister(),
        "fill": lambda index, data: memories[index].bytes.__setitem__(slice(None), numpy.frombuffer(data, numpy.uint8)),
        "read": lambda index: memories[index].bytes.tobytes(),
        "add": agent.add_remote_agent,
        "notify": agent.send_notif,
        "when": when,
        "transfer": lambda *arguments: transfer(agent, *arguments),
    }
    commands.send(None)
    while True:
        try:
            call, arguments = commands.recv()
        except EOFError:
            return
        if call == "end":
            break
        try:
            commands.send((calls[call](*arguments), None))
        except Exception as error:  # for the other process
            commands.send((None, f"{type(error).__name__}: {error}"))
    del agent, notifications, memories, calls
    commands.send(None)


class Peer:
    """An agent in a process of its own, which does what this process asks for."""

    def __init__(self, name, parameters=None, **config):
        # Each is the copy of a process that has imported NIXL, which takes most of a start, and has no agent.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["numpy", "nixl._api"])
        self.commands, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, name, parameters, config), daemon=True)
        self.process.start()
        theirs.close()
        self.name = name
        self._receive()

    def _receive(self):
        assert self.commands.poll(DEADLINE), f"{self.name} does not answer"
        return self.commands.recv()

    def ask(self, call, *arguments):
        self.commands.send((call, arguments))

    def answer(self):
        result, error = self._receive()
        if error:
            raise RuntimeError(error)
        return result

    def call(self, call, *arguments):
        self.ask(call, *arguments)
        return self.answer()

    def kill(self):
        self.process.kill()
        self.process.join(DEADLINE)

    def end(self):
        if self.process.is_alive():
            self.commands.send(("end", ()))
            self._receive()
            self.process.join(DEADLINE)
            assert self.process.exitcode == 0, f"{self.name} ended with {self.process.exitcode}"
