"""rates.py [BACKEND[:NAME=VALUE,...]...]

Rates of transfers of host memory between two processes by backends of NIXL, in one run: by default
FABRICAST, FABRICAST with libfabric's shm, and UCX. Each figure is the median of the rounds of half a second, with
the initiator polling; all bytes are compared afterwards. Prints also how long the transfer took to prepare.
"""

import multiprocessing
import sys
import time

import numpy

TOTAL = 64 << 20
DEADLINE = 60
SECONDS = 0.5
# Number of blocks and their length; several are spread over the memory.
SHAPES = [(1, 4096), (1, 65536), (1, 1 << 20), (1, 16 << 20), (1, 64 << 20), (1024, 4096), (1024, 16384), (500, 65536)]


def start_agent(name, backend, parameters):
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=[]))
    agent.create_backend(backend, parameters)
    return agent


def target(commands, backend, parameters):
    agent = start_agent("target", backend, parameters)
    memory = numpy.full(TOTAL, 255, dtype=numpy.uint8)
    agent.register_memory([(memory.ctypes.data, TOTAL, 0, "")], "DRAM")
    commands.send((agent.get_agent_metadata(), memory.ctypes.data))
    while (blocks := commands.recv()) is not None:
        commands.send([memory[start:start + length].tobytes() for start, length in blocks])


def measure(backend, parameters):
    context = multiprocessing.get_context("spawn")
    commands, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, backend, parameters), daemon=True)
    process.start()
    agent = start_agent("initiator", backend, parameters)
    assert commands.poll(DEADLINE), "the target does not start"
    metadata, address = commands.recv()
    agent.add_remote_agent(metadata)
    memory = numpy.random.default_rng(1).integers(0, 256, TOTAL, dtype=numpy.uint8)
    agent.register_memory([(memory.ctypes.data, TOTAL, 0, "")], "DRAM")
    for operation in ("WRITE", "READ"):
        for count, length in SHAPES:
            step = TOTAL // count
            blocks = [(index * step, length) for index in range(count)]
            begin = time.perf_counter()
            handle = agent.initialize_xfer(
                operation,
                agent.get_xfer_descs([(memory.ctypes.data + start, length, 0) for start, length in blocks], "DRAM"),
                agent.get_xfer_descs([(address + start, length, 0) for start, length in blocks], "DRAM"),
                "target",
            )
            prepared = time.perf_counter() - begin
            times, end = [], time.perf_counter() + SECONDS
            while len(times) < 3 or time.perf_counter() < end:
                begin = time.perf_counter()
                state = agent.transfer(handle)
                while state == "PROC":
                    state = agent.check_xfer_state(handle)
                    assert time.perf_counter() < begin + DEADLINE, "a transfer does not end"
                assert state == "DONE", state
                times.append(time.perf_counter() - begin)
            agent.release_xfer_handle(handle)
            commands.send(blocks)
            assert commands.recv() == [memory[start:start + length].tobytes() for start, length in blocks]
            median = sorted(times)[len(times) // 2]
            print(f"{operation:5} {count:5} x {length:8}  {median * 1e6:9.1f} us  {count * length / median / 1e9:6.2f} GB/s"
                  f"  prepared in {prepared * 1e3:.2f} ms", flush=True)
    commands.send(None)
    process.join(DEADLINE)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or ["FABRICAST", "FABRICAST:fabric==shm,policy==fabric-direct", "UCX"]:
        name, _, rest = chosen.partition(":")
        print(f"-- {chosen}", flush=True)
        measure(name, dict(pair.split("=", 1) for pair in rest.split(",") if pair))
