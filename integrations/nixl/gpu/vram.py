"""vram.py [--backend NAME] [--megabytes COUNT]

Transfers between memory of GPUs, and of the host, in two processes, by NIXL, and compares all bytes.
Prints the rate of each transfer. Uses GPU 0 and, if there is one, GPU 1. Needs NVIDIA's driver and NumPy, not
PyTorch.
"""

import argparse
import ctypes
import multiprocessing
import os
import sys
import time

import numpy

DEADLINE = 60


class Cuda:
    """Memory of a GPU, from cuMemAlloc, by the driver's own interface."""

    def __init__(self, device):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        self.device = min(device, count.value - 1)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name, *arguments):
        code = getattr(self.driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with {code}")

    def allocate(self, size):
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address):
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def _copy(self, to, source, size):
        self._call("cuMemcpyAsync", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size), None)
        self._call("cuCtxSynchronize")

    def write(self, address, data):
        self._copy(address, data.ctypes.data, data.nbytes)

    def read(self, address, size):
        data = numpy.empty(size, dtype=numpy.uint8)
        self._copy(data.ctypes.data, address, size)
        return data


class Memory:
    """Registered memory: of a GPU (VRAM), or of the host (DRAM)."""

    def __init__(self, agent, kind, size, cuda):
        self.agent, self.kind, self.size, self.cuda = agent, kind, size, cuda
        self.host = None if kind == "VRAM" else numpy.zeros(size, dtype=numpy.uint8)
        self.address = cuda.allocate(size) if kind == "VRAM" else self.host.ctypes.data
        self.device = cuda.device if kind == "VRAM" else 0
        self.registered = agent.register_memory([(self.address, size, self.device, "")], kind)

    def write(self, data):
        if self.kind == "VRAM":
            self.cuda.write(self.address, data)
        else:
            self.host[:] = data

    def read(self):
        return self.cuda.read(self.address, self.size) if self.kind == "VRAM" else self.host.copy()

    def close(self):
        self.agent.deregister_memory(self.registered)
        if self.kind == "VRAM":
            self.cuda.free(self.address)


def pattern(size, seed):
    return numpy.random.default_rng(seed).integers(0, 256, size, dtype=numpy.uint8)


def start_agent(name, backend):
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=[backend]))


def notified(agent, sender, message):
    end = time.monotonic() + DEADLINE
    received = []
    while message not in received:
        assert time.monotonic() < end, f"{message} did not arrive"
        received += agent.get_new_notifs().get(sender, [])


def target(commands, backend, size):
    """Has memory of each kind, and compares it when told to."""
    cuda = Cuda(1)
    agent = start_agent("target", backend)
    memories = {kind: Memory(agent, kind, size, cuda) for kind in ("VRAM", "DRAM")}
    described = {kind: (memory.address, memory.device) for kind, memory in memories.items()}
    commands.send((agent.get_agent_metadata(), described, cuda.device))
    while (request := commands.recv()) is not None:
        call, kind, argument = request
        if call == "write":
            memories[kind].write(argument)
            commands.send(True)
        else:
            notified(agent, "initiator", argument[0])
            commands.send(bool((memories[kind].read() == argument[1]).all()))
    for memory in memories.values():
        memory.close()
    commands.send(None)


def run(arguments):
    size = arguments.megabytes << 20
    context = multiprocessing.get_context("spawn")
    commands, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, arguments.backend, size), daemon=True)
    process.start()
    theirs.close()

    def ask(*request):
        commands.send(request)
        assert commands.poll(DEADLINE), "the target does not answer"
        return commands.recv()

    cuda = Cuda(0)
    agent = start_agent("initiator", arguments.backend)
    assert commands.poll(DEADLINE), "the target does not start"
    metadata, described, device = commands.recv()
    agent.add_remote_agent(metadata)
    print(f"GPU {cuda.device} to GPU {device}, {arguments.megabytes} MiB, {arguments.backend}", flush=True)
    # Whole memory, and every second block of 16 KiB, as pages of a cache.
    layouts = {"one block": [(0, size)], "16 KiB blocks": [(start, 16384) for start in range(0, size, 32768)]}
    wrong = number = 0
    for kind, there in (("VRAM", "VRAM"), ("DRAM", "VRAM"), ("VRAM", "DRAM"), ("DRAM", "DRAM")):
        memory = Memory(agent, kind, size, cuda)
        address, other = described[there]
        for layout, blocks in layouts.items():
            here_list = agent.get_xfer_descs([(memory.address + at, length, memory.device) for at, length in blocks], kind)
            there_list = agent.get_xfer_descs([(address + at, length, other) for at, length in blocks], there)
            moved = sum(length for _, length in blocks)
            for operation in ("WRITE", "READ"):
                number += 1
                source, before = pattern(size, 2 * number), pattern(size, 2 * number + 1)
                memory.write(source if operation == "WRITE" else before)
                ask("write", there, before if operation == "WRITE" else source)
                expected = before.copy()
                for at, length in blocks:
                    expected[at:at + length] = source[at:at + length]
                message = b"transfer %d" % number
                handle = agent.initialize_xfer(operation, here_list, there_list, "target", message)
                times = []
                for _ in range(arguments.rounds):
                    begin = time.perf_counter()
                    state = agent.transfer(handle)
                    while state == "PROC":
                        state = agent.check_xfer_state(handle)
                        assert time.perf_counter() < begin + DEADLINE, "a transfer does not end"
                    times.append(time.perf_counter() - begin)
                    assert state == "DONE", state
                agent.release_xfer_handle(handle)
                if operation == "WRITE":
                    right = ask("check", there, (message, expected))
                else:
                    right = bool((memory.read() == expected).all())
                wrong += not right
                median = sorted(times)[len(times) // 2]
                print(f"{kind} {operation:5} {there}  {layout:14} {moved / median / 1e9:8.2f} GB/s  "
                      f"{median * 1e6:9.1f} us  {'right' if right else 'WRONG'}", flush=True)
        memory.close()
    commands.send(None)
    assert commands.poll(DEADLINE), "the target does not end"
    process.join(DEADLINE)
    if wrong or process.exitcode:
        sys.exit(f"{wrong} transfers were wrong, the target ended with {process.exitcode}")
    print("ok")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--backend", default="FABRICAST")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=21)
    # Shows the paths.
    os.environ.setdefault("NIXL_LOG_LEVEL", "INFO")
    run(parser.parse_args())
