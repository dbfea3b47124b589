#!/usr/bin/env python3
"""Puts and gets between the tensors of two processes, compared with PyTorch's copy.

Each process has PyTorch, and its own PID, IPC, mount and network namespaces. Memory is from
expandable segments, or from cudaMalloc; only the path cuda-ipc is accepted. PyTorch compares
the data at its destination. The other process is on the next GPU; with one GPU only, on the
same, which is reported.

Prints a JSON object for each result, and at the end "ok" or the failure. The exit status is 0
only after "ok".
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

# No bytecode files beside the scripts.
sys.dont_write_bytecode = True

from first import First
from library import Failure, report
from memory import MEBI
from side import KINDS, Side, namespaces, second

# A new /proc, as containers have: CUDA does not start without.
NAMESPACES = ["--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--ipc", "--net"]


def play(options):
    """Runs one of the two processes."""
    try:
        side = Side(options, options.role)
        if options.role == "first":
            First(side).run()
        else:
            second(side)
        side.library.call("end")
    except Exception as error:  # the parent reports any exception
        text = str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
        with open(os.path.join(options.directory, f"failed-{options.role}"), "w") as file:
            file.write(text)
        # Without exit handlers, which may hang.
        os._exit(1)


def die_with_parent():
    """Ends the children however the parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def can_isolate():
    command = ["unshare", *NAMESPACES, "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def start(role, directory, is_isolated):
    command = ["unshare", *NAMESPACES] if is_isolated else []
    program = os.path.dirname(os.path.abspath(__file__))
    command += [sys.executable, program, *sys.argv[1:], "--role", role, "--directory", directory]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)


def wait(children, directory, deadline):
    """Waits until both have exited, one has failed, or the deadline has passed."""
    end = time.monotonic() + deadline
    while any(child.poll() is None for child in children.values()):
        if any(child.poll() for child in children.values()):
            # The other process may have the better reason, and be about to print it.
            end = min(end, time.monotonic() + 2)
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    reasons = []
    for role, child in children.items():
        path = os.path.join(directory, f"failed-{role}")
        if os.path.exists(path):
            with open(path) as file:
                reasons.append(f"{role}: {file.read()}")
        elif child.poll() is None:
            reasons.append(f"{role}: had not ended")
        elif child.poll() != 0:
            reasons.append(f"{role}: ended with status {child.poll()}")
    if reasons:
        raise Failure("; ".join(reasons))


def compare_namespaces(directory):
    """Checks that each process has its own namespaces."""
    seen = [namespaces()]
    processes = []
    for role in ("first", "second"):
        with open(os.path.join(directory, f"hello-{role}")) as file:
            hello = json.load(file)
        seen.append(hello["namespaces"])
        processes.append(hello["process"])
    shared = [kind for kind in KINDS if len({names[kind] for names in seen}) != len(seen)]
    report(what="namespaces", own=[kind for kind in KINDS if kind not in shared],
           processes=processes)
    if shared:
        raise Failure(f"shared namespaces: {shared}")


def lead(options):
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    os.environ.pop("PYTORCH_ALLOC_CONF", None)
    if options.memory == "expandable":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    is_isolated = not options.same_namespaces and can_isolate()
    if not (is_isolated or options.same_namespaces or options.emulated):
        raise Failure("create namespaces with unshare failed. Run it as root")
    if not is_isolated:
        print("skipped: separate namespaces", flush=True)
    with tempfile.TemporaryDirectory(prefix="fabricast-torch-") as directory:
        children = {}
        try:
            for role in ("first", "second"):
                children[role] = start(role, directory, is_isolated)
            wait(children, directory, options.deadline)
            if is_isolated:
                compare_namespaces(directory)
        finally:
            for child in children.values():
                child.kill()
            for child in children.values():
                child.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libtorch_side.so")
    parser.add_argument("--memory", choices=["expandable", "plain"], default="expandable")
    parser.add_argument("--emulated", action="store_true", help="without PyTorch and GPU")
    parser.add_argument("--same-namespaces", action="store_true",
                        help="leave both processes in the namespaces of this one")
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")],
                        help="bytes, multiples of 4 [default: 64 to 1 GiB]")
    parser.add_argument("--rounds", type=int, default=15, help="of a measurement, interleaved")
    parser.add_argument("--least-ratio", type=float, default=0.97,
                        help="of a raw copy between two GPUs, from 1 GiB on")
    parser.add_argument("--deadline", type=float, default=300, help="seconds for all of it")
    parser.add_argument("--role", choices=["first", "second"], help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sizes is None:
        real = [64, 4 * MEBI, 64 * MEBI, 1024 * MEBI]
        options.sizes = [64, MEBI, 8 * MEBI] if options.emulated else real
    if options.role:
        play(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if options.emulated and options.memory == "plain":
            raise Failure("an emulated device has no plain memory that can be exported")
        lead(options)
    except Failure as failure:
        print(f"failed: {failure}", flush=True)
        sys.exit(1)
    print("ok", flush=True)


if __name__ == "__main__":
    main()
