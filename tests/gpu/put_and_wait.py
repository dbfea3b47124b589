#!/usr/bin/env python3
"""put_and_wait.py [--rounds N]

Times of `agent.put(route, blocks).wait()` from GPU 0 to GPU 1, as a program gets them that sets nothing: with both GPUs
visible in both processes, and with each process seeing only its own (`CUDA_VISIBLE_DEVICES`), for memory of cudaMalloc,
of expandable segments, and of the pool. Where both are visible, a raw copy and its synchronization take turns with the
puts. All bytes are compared. Needs two GPUs, PyTorch and the package fabricast.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

SIZES = [64, 4 << 10, 1 << 20, 4 << 20, 64 << 20, 1 << 30]
MEMORIES = ["plain", "expandable", "pool"]


def tensor(memory, device, length):
    import contextlib

    import fabricast.torch
    import torch

    with fabricast.torch.pool() if memory == "pool" else contextlib.nullcontext():
        return torch.zeros(length, dtype=torch.uint8, device=device)


def contents(length, device):
    """The bytes of a put of this length."""
    import torch

    if length > 64 << 20:
        return torch.full((length,), 7, dtype=torch.uint8, device=device)
    return torch.arange(length, device=device, dtype=torch.int64).remainder_(251).to(torch.uint8)


def owner(directory, memory, device):
    """Owns the memory that is written."""
    import fabricast
    import torch

    torch.cuda.set_device(device)
    target = tensor(memory, device, max(SIZES))
    with fabricast.Agent("owner", directory=directory) as agent:
        region = agent.register(target, read=True, write=True)
        torch.cuda.synchronize()
        print(agent.card.hex(), region.descriptor.hex(), flush=True)
        for line in sys.stdin:
            length = int(line)
            wrong = int((target[:length] != contents(length, device)).sum())
            print(wrong, flush=True)


def initiator(directory, memory, device, raw_device, rounds):
    import fabricast
    import torch

    torch.cuda.set_device(device)
    words = sys.stdin.readline().split()
    card, descriptor = (bytes.fromhex(word) for word in words)
    source = tensor(memory, device, max(SIZES))
    raw = torch.zeros(max(SIZES), dtype=torch.uint8, device=raw_device) if raw_device else None
    with fabricast.Agent("initiator", directory=directory) as agent:
        route = agent.join(agent.connect(card), descriptor, agent.register(source))
        for length in SIZES:
            source[:length] = contents(length, device)
            torch.cuda.synchronize()
            blocks, puts, raws, used = [(0, 0, length)], [], [], 0.0
            stream = torch.cuda.Stream()
            for round in range(rounds + 3):
                begin, cpu = time.perf_counter(), time.process_time()
                agent.put(route, blocks).wait()
                took, spent = time.perf_counter() - begin, time.process_time() - cpu
                if round >= 3:
                    puts.append(took)
                    used += spent
                if raw is not None:
                    with torch.cuda.stream(stream):
                        begin = time.perf_counter()
                        raw[:length].copy_(source[:length], non_blocking=True)
                        stream.synchronize()
                        if round >= 3:
                            raws.append(time.perf_counter() - begin)
            print(f"check {length}", flush=True)
            wrong = sys.stdin.readline().strip()
            median = statistics.median(puts)
            text = f"{length:>11} {1e6 * median:>10.1f} us {length / median / 1e9:>7.1f} GB/s"
            text += f", {100 * used / sum(puts):5.1f} % of a core"
            if raws:
                text += f", raw {1e6 * statistics.median(raws):>9.1f} us, ratio {statistics.median(raws) / median:.3f}"
            verdict = "all bytes right" if wrong == "0" else f"{wrong} bytes WRONG"
            print(f"row {text}, {route.path}, {verdict}", flush=True)
    print("end", flush=True)


def run(memory, is_hidden, rounds):
    """True if all bytes were right, by the direct path."""
    print(f"memory {memory}, {'each process sees its own GPU' if is_hidden else 'both GPUs visible'}", flush=True)
    with tempfile.TemporaryDirectory() as directory:

        def start(role, gpu):
            environment = dict(os.environ)
            environment["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{memory == 'expandable'}"
            device = f"cuda:{gpu}"
            if is_hidden:
                environment["CUDA_VISIBLE_DEVICES"], device = str(gpu), "cuda:0"
            raw = "" if is_hidden else "cuda:1"
            command = [sys.executable, __file__, role, directory, memory, device, raw, str(rounds)]
            return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        there, here = start("owner", 1), start("initiator", 0)
        is_right = True
        try:
            pass_line(there, here)
            while (line := line_of(here)) != "end":
                kind, text = line.split(" ", 1)
                if kind == "check":
                    there.stdin.write(text + "\n")
                    there.stdin.flush()
                    pass_line(there, here)
                else:
                    print(text, flush=True)
                    is_right &= "cuda-ipc, all bytes right" in text
        except EndedProcess as error:
            print(error, flush=True)
            is_right = False
        finally:
            for process in (here, there):
                process.terminate()
                process.wait(60)
        return is_right


class EndedProcess(Exception):
    """A process of a measurement ended before its last line."""


def line_of(process):
    line = process.stdout.readline()
    if not line:
        raise EndedProcess(f"process {process.args[2]} ended")
    return line.strip()


def pass_line(source, target):
    target.stdin.write(line_of(source) + "\n")
    target.stdin.flush()


def main():
    if len(sys.argv) > 1 and sys.argv[1] in ("owner", "initiator"):
        role, directory, memory, device, raw, rounds = sys.argv[1:]
        if role == "owner":
            return owner(directory, memory, device)
        return initiator(directory, memory, device, raw, int(rounds))
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--rounds", type=int, default=51)
    options = parser.parse_args()
    failed = [
        f"{memory}, hidden {is_hidden}"
        for memory in MEMORIES
        for is_hidden in (False, True)
        if not run(memory, is_hidden, options.rounds)
    ]
    if failed:
        sys.exit(f"put_and_wait: failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
