"""Unmodified NCCL programs beside the same with the preloaded library, on two or more GPUs of one machine.

    python nccl_collectives.py --library libfabricast_nccl.so [--gpus 2] [--rounds 3] [--largest 1G] [--only operations]

Starts the ranks by torchrun, once without and once with the library in each round, so that both have the same machine
at the same time of day. Prints one table: for each operation and size the median time of NCCL alone and interposed (below
16M the shortest of all rounds, because the host adds noise to these), which library the report says was used, and the gain; the loss and the time of a step of a small FSDP training; and the
time of a matrix product alone and beside all-gathers on another stream. All data are checked: a wrong element ends it
with 1.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

SIZES = [8, 1 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30]
OPERATIONS = ["all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all"]
# Operations before the times that count: both libraries are tried meanwhile.
SETTLING = 24
TIMEOUT = 900


def size_of(text):
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


# ------------------------------------------------------------------ a rank


class Rank:
    def __init__(self):
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank, self.local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local)
        self.device = torch.device("cuda", self.local)
        dist.init_process_group("nccl", device_id=self.device)
        self.ranks = dist.get_world_size()

    def buffers(self, operation, size):
        """Input and output of an operation whose blocks have so many bytes, and what is expected of the first one."""
        torch, count = self.torch, size // 4
        own = torch.full((count,), float(self.rank + 1), device=self.device)
        total = float(self.ranks * (self.ranks + 1) // 2)
        each = torch.arange(1, self.ranks + 1, device=self.device, dtype=torch.float32).repeat_interleave(count)
        if operation in ("all-reduce", "reduce"):
            return own, torch.empty_like(own), torch.full_like(own, total)
        if operation == "broadcast":
            return own, torch.empty_like(own), torch.ones_like(own)
        if operation == "all-gather":
            return own, torch.empty(count * self.ranks, device=self.device), each
        if operation == "reduce-scatter":
            return own.repeat(self.ranks), torch.empty_like(own), torch.full_like(own, total)
        return own.repeat(self.ranks), torch.empty(count * self.ranks, device=self.device), each

    def run(self, operation, given, result):
        """Carries out an operation once. Those in place copy their input first: not a part of their time."""
        dist = self.dist
        if operation == "all-reduce":
            dist.all_reduce(result)
        elif operation == "reduce":
            dist.reduce(result, 0)
        elif operation == "broadcast":
            dist.broadcast(result, 0)
        elif operation == "all-gather":
            dist.all_gather_into_tensor(result, given)
        elif operation == "reduce-scatter":
            dist.reduce_scatter_tensor(result, given)
        else:
            dist.all_to_all_single(result, given)

    def is_in_place(self, operation):
        return operation in ("all-reduce", "reduce", "broadcast")

    def check(self, operation, result, expected, size):
        if operation == "reduce" and self.rank != 0:
            return
        if not self.torch.equal(result, expected):
            at = int((result != expected).nonzero()[0])
            found = f"{float(result[at])}, not {float(expected[at])}"
            sys.exit(f"rank {self.rank}: {operation} of {size} bytes: element {at} is {found}")

    def measure(self, operation, size):
        """The median time of an operation in microseconds, by events of the device; the slowest rank's."""
        torch = self.torch
        given, result, expected = self.buffers(operation, size)
        turns = SETTLING + (50 if size <= 16 << 20 else 12)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(turns)]
        for turn, (begin, end) in enumerate(events):
            if self.is_in_place(operation):
                result.copy_(given)
            else:
                result.fill_(-1)
            begin.record()
            self.run(operation, given, result)
            end.record()
            if turn % 8 == 0 or turn == turns - 1:
                self.check(operation, result, expected, size)
            if turn < SETTLING:
                # Times are known before the next operation.
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        times = torch.tensor([begin.elapsed_time(end) for begin, end in events[SETTLING:]], device=self.device)
        self.dist.all_reduce(times, op=self.dist.ReduceOp.MAX)
        return float(times.median()) * 1e3

    def operations(self, largest):
        found = {}
        for operation in OPERATIONS:
            for size in SIZES:
                # All-to-all and others have a block for each rank.
                if size <= largest:
                    found[f"{operation} {size}"] = self.measure(operation, size)
                    self.torch.cuda.empty_cache()
        return found

    def training(self, steps=80):
        """The last loss and the median time of a step in milliseconds, of a small model by FSDP."""
        torch = self.torch
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(1)
        torch.use_deterministic_algorithms(True, warn_only=True)
        layers = [torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.GELU()) for _ in range(8)]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(2048, 16)).to(self.device)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        torch.manual_seed(100 + self.rank)
        inputs = torch.randn(64, 2048, device=self.device)
        targets = torch.randint(0, 16, (64,), device=self.device)
        times, loss = [], None
        for _ in range(steps):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        mean = loss.detach().clone()
        self.dist.all_reduce(mean)
        # Both libraries are tried in the first steps.
        return {"loss": float(mean) / self.ranks, "step": statistics.median(times[steps // 2 :])}

    def overlap(self, size=64 << 20, side=8192):
        """The time of matrix products alone, and beside all-gathers on another stream, in milliseconds."""
        torch = self.torch
        one = torch.randn(side, side, device=self.device, dtype=torch.bfloat16)
        other = torch.randn(side, side, device=self.device, dtype=torch.bfloat16)
        product = torch.empty_like(one)
        given, gathered, expected = self.buffers("all-gather", size)
        for _ in range(SETTLING):
            self.run("all-gather", given, gathered)
            torch.matmul(one, other, out=product)
            torch.cuda.synchronize()
        reference = product.clone()

        def time_of(is_beside):
            found = []
            for _ in range(10):
                self.dist.barrier()
                torch.cuda.synchronize()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                # NCCL's own stream: asynchronous operations run there.
                works = []
                if is_beside:
                    for _ in range(4):
                        works.append(self.dist.all_gather_into_tensor(gathered, given, async_op=True))
                begin.record()
                for _ in range(10):
                    torch.matmul(one, other, out=product)
                end.record()
                for work in works:
                    work.wait()
                torch.cuda.synchronize()
                found.append(begin.elapsed_time(end) / 10)
            return statistics.median(found)

        alone, beside = time_of(False), time_of(True)
        self.check("all-gather", gathered, expected, size)
        if not torch.equal(product, reference):
            sys.exit(f"rank {self.rank}: the matrix product differs beside an all-gather")
        return {"alone": alone, "beside": beside}


def run_rank(arguments):
    rank = Rank()
    found = {}
    if arguments.only in (None, "operations"):
        found["operations"] = rank.operations(arguments.largest)
    if arguments.only in (None, "training"):
        found["training"] = rank.training()
    if arguments.only in (None, "overlap"):
        found["overlap"] = rank.overlap()
    if rank.rank == 0:
        with open(arguments.result, "w") as file:
            json.dump(found, file)
    rank.dist.barrier()
    rank.dist.destroy_process_group()


# ------------------------------------------------------------------ all ranks


def run_job(arguments, is_interposed, directory, number):
    """Runs all ranks. Returns what rank 0 found, and the text of its report."""
    result, report = (os.path.join(directory, f"{name}-{number}") for name in ("result", "report"))
    environment = dict(os.environ)
    environment.pop("LD_PRELOAD", None)
    if is_interposed:
        environment |= {"LD_PRELOAD": arguments.library, "FABRICAST_NCCL": "on", "FABRICAST_NCCL_REPORT": report}
    else:
        environment["FABRICAST_NCCL"] = "off"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.gpus}"]
    command += [os.path.abspath(__file__), "--rank", "--result", result, "--largest", str(arguments.largest)]
    if arguments.only:
        command += ["--only", arguments.only]
    ended = subprocess.run(command, env=environment, timeout=TIMEOUT, stdout=sys.stderr)
    if ended.returncode != 0:
        sys.exit(f"the ranks {'with' if is_interposed else 'without'} the library failed ({ended.returncode})")
    with open(result) as file:
        found = json.load(file)
    text = ""
    if is_interposed and os.path.exists(report):
        with open(report) as file:
            text = file.read()
    return found, text


def chosen(report):
    """The part of the calls that were ours, by operation and size class."""
    found = {}
    row = re.compile(r"^\s+([a-z-]+)\s+\w+\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)\s", re.MULTILINE)
    for operation, size, calls, ours, _ in row.findall(report):
        found[f"{operation} {size}"] = int(ours) / max(int(calls), 1)
    return found


def text_of(size):
    for unit, bytes_of_unit in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size >= bytes_of_unit:
            return f"{size // bytes_of_unit}{unit}"
    return str(size)


def compare(arguments):
    rounds = {False: [], True: []}
    report = ""
    with tempfile.TemporaryDirectory() as directory:
        for number in range(arguments.rounds):
            # In alternating order.
            for is_interposed in (number % 2 == 0, number % 2 == 1):
                found, text = run_job(arguments, is_interposed, directory, f"{number}-{is_interposed}")
                rounds[is_interposed].append(found)
                report = text or report
    if not report:
        sys.exit("no report was written: the library was not preloaded, or NCCL is not a shared library")

    def median(is_interposed, part, name):
        times = [one[part][name] for one in rounds[is_interposed]]
        # The host takes longer for small operations than the devices, and other programs delay it: that only adds.
        is_small = part == "operations" and int(name.split(" ")[1]) < 16 << 20
        return min(times) if is_small else statistics.median(times)

    width = 44
    print(f"{'':{width}} {'NCCL':>12} {'interposed':>12} {'gain':>6}  ours")
    ours = chosen(report)
    for part, unit in (("operations", "us"), ("training", "ms"), ("overlap", "ms")):
        for name in rounds[False][0].get(part, {}):
            plain, interposed = median(False, part, name), median(True, part, name)
            title = f"{part} {name}"
            share = ""
            if part == "operations":
                operation, size = name.split(" ")
                title = f"{operation} {text_of(int(size))}"
                share = f"{ours.get(name, 0):.0%}"
            if name == "loss":
                print(f"{title:{width}} {plain:>12.6f} {interposed:>12.6f}")
                continue
            gain = plain / interposed if interposed else 0
            print(f"{title + ', ' + unit:{width}} {plain:>12.2f} {interposed:>12.2f} {gain:>6.2f}  {share}")
    if "training" in rounds[False][0]:
        plain, interposed = median(False, "training", "loss"), median(True, "training", "loss")
        # Elements are added in another order, which changes the last bits of each step.
        if abs(plain - interposed) > 1e-3 * abs(plain):
            sys.exit(f"the losses differ: {plain} and {interposed}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="path of libfabricast_nccl.so")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", type=size_of, default=1 << 30)
    parser.add_argument("--only", choices=["operations", "training", "overlap"])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return run_rank(arguments)
    if not arguments.library or not os.path.exists(arguments.library):
        parser.error("--library: the file does not exist")
    arguments.library = os.path.abspath(arguments.library)
    compare(arguments)


if __name__ == "__main__":
    main()
