#!/usr/bin/env python3
"""Ranks that torchrun starts gather bytes through its store, without PyTorch.

The program is the example gather_rank of the crate control. Cases:

  plain    three exchanges
  absent   a rank does not take part: the errors of the others name it
  restart  a rank fails, and torchrun starts all of them again
  beside   each rank is started by a process that uses the store by PyTorch at the same time
  c10d     as plain, with the rendezvous of --standalone, whose store torchrun shares since 2.6

Prints a JSON object for each case, and at the end "ok" or the failure. The exit status is 0 only
after "ok".
"""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

RESTARTS = 1
# What the case "beside" runs.
BESIDE = """
import os, subprocess, sys
import torch.distributed as dist
dist.init_process_group("gloo")
program = subprocess.Popen(sys.argv[1:])
for _ in range(20):
    dist.barrier()
status = program.wait()
dist.barrier()
dist.destroy_process_group()
sys.exit(status)
"""


class Failure(Exception):
    """A case did not end as it must."""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def torchrun(options, arguments, deadline):
    """Status and output of torchrun. All its processes are ended after the deadline."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nproc-per-node", str(options.ranks), *arguments]
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output,
                                 stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            status = child.wait(deadline)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # torchrun ends its ranks.
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
                try:
                    child.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        output.seek(0)
        return status, output.read()


def expect(output, pattern, count):
    found = len(re.findall(pattern, output))
    if found != count:
        raise Failure(f"{found} lines \"{pattern}\" instead of {count}")


def check(options, case, output):
    """Compares the output with what the case must print."""
    ranks = options.ranks
    if case == "absent":
        last = ranks - 1
        expect(output, rf"rank {last}: absent as requested", 1)
        expect(output, rf"rank \d+: expected: exchange among ranks \(torchrun\) failed: deadline "
                       rf"exceeded: rank {last} did not come within 3s", ranks - 1)
        return
    restarts = RESTARTS if case == "restart" else 0
    expect(output, r"rank \d+ of \d+: started by torchrun, job ", ranks * (restarts + 1))
    expect(output, r"rank \d+: fails as requested", restarts)
    for rank in range(ranks):
        expect(output, rf"rank {rank}: ok after {restarts} restarts", 1)


def run(options, case):
    port = ["--master-port", str(free_port())]
    program = ["--no-python", options.program]
    last = str(options.ranks - 1)
    begun = time.monotonic()
    with tempfile.NamedTemporaryFile("w", suffix=".py") as beside:
        beside.write(BESIDE)
        beside.flush()
        arguments = {
            "plain": [*port, *program],
            "absent": [*port, *program, "--absent", last, "--timeout", "3"],
            "restart": [*port, "--max-restarts", str(RESTARTS), *program, "--fail", last],
            "beside": [*port, beside.name, options.program],
            "c10d": ["--standalone", *program],
        }[case]
        status, output = torchrun(options, arguments, options.deadline)
    try:
        if status != 0:
            raise Failure("it did not end in time" if status is None else f"status {status}")
        check(options, case, output)
    except Failure as failure:
        raise Failure(f"{case}: {failure}. Its output:\n{output}") from None
    times = [line for line in output.splitlines() if re.search(r"rank 0: \d+ bytes gathered", line)]
    print(json.dumps({"what": case, "ranks": options.ranks,
                      "seconds": round(time.monotonic() - begun, 1), "rank_0": times}), flush=True)


def main():
    cases = ["plain", "absent", "restart", "beside", "c10d"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", required=True, type=os.path.abspath, help="gather_rank")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--deadline", type=float, default=60, help="seconds for each case")
    parser.add_argument("cases", nargs="*", metavar="CASE",
                        help=f"of: {' '.join(cases)} [default: all]")
    options = parser.parse_args()
    unknown = [case for case in options.cases if case not in cases]
    if unknown:
        parser.error(f"unknown cases: {' '.join(unknown)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    import torch

    version = torch.__version__
    print(json.dumps({"what": "versions", "torch": version}), flush=True)
    shares_c10d = [int(number) for number in re.findall(r"\d+", version)[:2]] >= [2, 6]
    try:
        for case in options.cases or cases:
            if case == "c10d" and not shares_c10d:
                print(f"skipped: {case}: torchrun {version} does not share its store", flush=True)
            else:
                run(options, case)
    except Failure as failure:
        print(f"failed: {failure}", flush=True)
        sys.exit(1)
    print("ok", flush=True)


if __name__ == "__main__":
    main()
