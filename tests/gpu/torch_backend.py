"""The backend "fabricast" of torch.distributed with CUDA tensors, beside NCCL, on two or more GPUs of one machine.

    PYTHONPATH=... python torch_backend.py [--gpus 2] [--one-visible]

Starts the ranks by torchrun; with --one-visible each sees its own GPU only. In the same processes, with both backends:
all operations for several types and sizes, whose results must be equal; tensors that are written by other streams and
used by them afterwards; a training step by DistributedDataParallel, whose losses must be equal; times of all-gather and
all-reduce. A difference ends it with 1.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

SIZES = [7, 4096, 1 << 20, 24 << 20]
TIMED = [1 << 10, 1 << 20, 64 << 20]


def values(torch, rank, count, dtype, device):
    return ((torch.arange(count, device=device) + 3 * rank) % 11).to(dtype)


def operations(torch, dist, rank, size, device, group):
    """The results of all operations."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8):
        for count in SIZES if dtype in (torch.float32, torch.bfloat16) else SIZES[:2]:
            own = values(torch, rank, count, dtype, device)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
                tensor = own.clone()
                dist.all_reduce(tensor, op, group=group)
                yield f"all-reduce {op} {dtype} {count}", tensor
            tensor = own.clone()
            dist.broadcast(tensor, 1, group=group)
            yield f"broadcast {dtype} {count}", tensor
            tensor = own.clone()
            dist.reduce(tensor, 1, group=group)
            if rank == 1:
                yield f"reduce {dtype} {count}", tensor
            gathered = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(gathered, own, group=group)
            yield f"all-gather {dtype} {count}", torch.stack(gathered)
            row = torch.empty(size * count, dtype=dtype, device=device)
            dist.all_gather_into_tensor(row, own, group=group)
            yield f"all-gather row {dtype} {count}", row
            blocks = values(torch, rank, size * count, dtype, device)
            part = torch.empty_like(own)
            dist.reduce_scatter_tensor(part, blocks, group=group)
            yield f"reduce-scatter {dtype} {count}", part
            exchanged = torch.empty_like(blocks)
            dist.all_to_all_single(exchanged, blocks, group=group)
            yield f"all-to-all {dtype} {count}", exchanged
            lists = [torch.empty_like(own) for _ in range(size)]
            dist.all_to_all(lists, list(blocks.split(count)), group=group)
            yield f"all-to-all lists {dtype} {count}", torch.stack(lists)
            dist.reduce_scatter(part, list(blocks.split(count)), group=group)
            yield f"reduce-scatter lists {dtype} {count}", part.clone()
    work = dist.all_reduce(own, async_op=True, group=group)
    work.wait()
    yield "all-reduce async", own
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late = values(torch, rank, 1 << 20, torch.float32, device)
        dist.all_reduce(late, group=group)
        doubled = late * 2
    torch.cuda.current_stream().wait_stream(side)
    yield "on another stream", doubled
    strided = values(torch, rank, 12_000, torch.float32, device).reshape(100, 120).t()
    dist.all_reduce(strided, group=group)
    yield "strided", strided.contiguous()
    dist.barrier(group=group)


def losses(torch, device, rank, group):
    """The losses of some steps of training."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).to(device)
    model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)
    found = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(torch.randn(64, 512, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def times(torch, dist, device, size, group):
    for count in TIMED:
        own = torch.ones(count // 4, device=device)
        row = torch.empty(size * own.numel(), device=device)
        for name, run in (
            ("all-gather", lambda: dist.all_gather_into_tensor(row, own, group=group)),
            ("all-reduce", lambda: dist.all_reduce(own, group=group)),
        ):
            found = []
            for _ in range(25):
                torch.cuda.synchronize()
                began = time.perf_counter()
                run()
                torch.cuda.synchronize()
                found.append(time.perf_counter() - began)
                own.fill_(1)
            yield name, count, statistics.median(found[5:])


def run_rank():
    import torch
    import torch.distributed as dist

    import fabricast.torch.distributed  # noqa: F401

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("ONE_VISIBLE"):
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
        device = torch.device("cuda", 0)
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    ours = dist.new_group(backend="fabricast")
    count = 0
    pairs = zip(operations(torch, dist, rank, size, device, ours), operations(torch, dist, rank, size, device, None))
    for (name, found), (_, expected) in pairs:
        if not torch.equal(found, expected):
            sys.exit(f"rank {rank}: {name}: {found.flatten()[:4]} instead of {expected.flatten()[:4]}")
        count += 1
    found = [losses(torch, device, rank, group) for group in (ours, None)]
    if any(abs(a - b) > 1e-5 * abs(b) for a, b in zip(*found)):
        sys.exit(f"rank {rank}: losses {found}")
    measured = [list(times(torch, dist, device, size, group)) for group in (ours, None)]
    if rank == 0:
        print(f"{count} results equal to those of NCCL, losses of training equal: {found[0][0]:.4f} to {found[0][-1]:.4f}")
        print(f"{'operation':12} {'bytes':>10} {'fabricast us':>13} {'nccl us':>9}")
        for (name, size_of, own), (_, _, nccl) in zip(*measured):
            print(f"{name:12} {size_of:>10} {own * 1e6:13.1f} {nccl * 1e6:9.1f}")
    dist.destroy_process_group()


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--gpus", type=int, default=2)
    arguments.add_argument("--one-visible", action="store_true")
    arguments = arguments.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "FABRICAST_DIRECTORY": directory, "TORCH_BACKEND_RANK": "1"}
        if arguments.one_visible:
            environment["ONE_VISIBLE"] = "1"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.gpus}"]
        sys.exit(subprocess.run([*command, os.path.abspath(__file__)], env=environment, timeout=280).returncode)


if __name__ == "__main__":
    run_rank() if "TORCH_BACKEND_RANK" in os.environ else main()
