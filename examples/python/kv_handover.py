"""Hands the KV cache of a request from a prefill process to a decode process, block by block.

    python kv_handover.py [--prefill emulated:0] [--decode emulated:1] [--requests 8]

Both caches consist of blocks for 16 tokens. The decode process says in which of its blocks it wants a request; the prefill
process puts its blocks there, and the notice that comes with the last one says that the request is complete.
"""

import argparse
import multiprocessing
import struct
import tempfile
from multiprocessing.connection import Connection

import fabricast
import numpy

BLOCKS, BLOCK_SHAPE = 64, (2, 16, 8, 64)  # keys and values, tokens, heads, width
BLOCK_BYTES = 2 * 16 * 8 * 64 * 2
FOR_REQUEST = 6
REQUEST, DONE = 1, 2


def next_notice(agent: fabricast.Agent, tag: int) -> tuple[int, bytes]:
    while True:
        event = agent.next_event(timeout=60)
        if event is None:
            raise TimeoutError("no notice")
        if event.kind == "notice" and event.tag >> 32 == tag:
            return event.tag & 0xFFFFFFFF, event.data


def prefill(connection: Connection, directory: str, device: str, requests: int) -> None:
    agent = fabricast.Agent("prefill", directory=directory)
    cache = fabricast.allocate((BLOCKS, *BLOCK_SHAPE), "float16", device=device)
    region = agent.register(cache)
    connection.send_bytes(agent.card)
    card, descriptor = connection.recv_bytes(), connection.recv_bytes()
    decode = agent.connect(card)
    route = agent.join(decode, descriptor, region)
    for _ in range(requests):
        request, data = next_notice(agent, REQUEST)
        there = struct.unpack(f"<{FOR_REQUEST}H", data)
        here = [(request * 7 + number * 5) % BLOCKS for number in range(FOR_REQUEST)]
        for number, block in enumerate(here):
            cache[block] = request + number / 8  # what the model computes
        blocks = [(to * BLOCK_BYTES, frm * BLOCK_BYTES, BLOCK_BYTES) for to, frm in zip(there, here)]
        agent.put(route, blocks, notice=(DONE << 32 | request, b"")).wait()
    connection.send_bytes(route.path.encode())
    agent.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefill", default="emulated:0")
    parser.add_argument("--decode", default="emulated:1")
    parser.add_argument("--requests", type=int, default=8)
    options = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as directory:
        process = context.Process(target=prefill, args=(there, directory, options.prefill, options.requests))
        process.start()
        agent = fabricast.Agent("decode", directory=directory)
        cache = fabricast.allocate((BLOCKS, *BLOCK_SHAPE), "float16", device=options.decode)
        region = agent.register(cache, write=True)
        card = here.recv_bytes()
        here.send_bytes(agent.card)
        here.send_bytes(region.descriptor)
        peer = agent.connect(card)
        free = list(range(BLOCKS))
        for request in range(options.requests):
            mine = [free.pop(number) for number in range(FOR_REQUEST)]
            agent.notify(peer, REQUEST << 32 | request, struct.pack(f"<{FOR_REQUEST}H", *mine)).wait()
            done, _ = next_notice(agent, DONE)
            assert done == request
            for number, block in enumerate(mine):
                assert (numpy.asarray(cache)[block] == numpy.float16(request + number / 8)).all()
            free += mine
        path = here.recv_bytes().decode()
        process.join(60)
        region.close()
        agent.close()
    print(f"{options.requests} requests of {FOR_REQUEST} blocks from {options.prefill} to {options.decode} by {path}: ok")


if __name__ == "__main__":
    main()
