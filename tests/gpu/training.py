"""A small training on a GPU: as it is, with the preloaded hook, and in the pool of the package.

    python training.py --hook libfabricast_hook.so [--rounds 3]

Prints the last loss and the time of a step of each, in turn; with a CUDA graph, too. Inside of each training process a
worker gets tensors from a queue of torch.multiprocessing.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time


def worker(tasks, results):
    for tensor in iter(tasks.get, None):
        results.put((str(tensor.device), float(tensor.sum())))
        del tensor


def train(memory, has_graph, steps=600):
    import torch
    import torch.multiprocessing as multiprocessing

    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    device = "cuda:0"
    pool = contextlib.nullcontext()
    if memory == "pool":
        import fabricast.torch

        fabricast.torch.install()
        pool = fabricast.torch.pool(device)
    with pool:
        model = torch.nn.Sequential(
            torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 4096), torch.nn.ReLU(),
            torch.nn.Linear(4096, 16),
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=has_graph)
        inputs = torch.randn(512, 1024, device=device)
        targets = torch.randint(0, 16, (512,), device=device)
        loss = torch.zeros((), device=device)

        def step():
            optimizer.zero_grad(set_to_none=True)
            found = torch.nn.functional.cross_entropy(model(inputs), targets)
            found.backward()
            optimizer.step()
            return found

        def noise():
            # Allocations of many lengths, as of a real program.
            return [torch.empty((number + 1) * 100_000, device=device) for number in range(8)]

        times = []
        if has_graph:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                loss = step()
        for _ in range(steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            kept = noise()
            if has_graph:
                graph.replay()
            else:
                loss = step()
            del kept
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        shared = torch.ones(1 << 20, device=device)
        torch.cuda.synchronize()
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    process = context.Process(target=worker, args=(tasks, results))
    process.start()
    for tensor in (shared, shared[::2]):
        tasks.put(tensor)
        assert results.get(timeout=100) == (device, float(tensor.sum()))
    tasks.put(None)
    process.join(60)
    assert process.exitcode == 0
    print(json.dumps({"loss": loss.item(), "step": 1e6 * statistics.median(times[50:])}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hook")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", choices=("plain", "expandable", "hook", "hook-expandable", "pool"))
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--kinds", nargs="+", default=["plain", "hook", "expandable", "hook-expandable", "pool"])
    options = parser.parse_args()
    if options.train:
        return train(options.train, options.graph)
    failed = False
    for has_graph in (False, True):
        found = {}
        for _ in range(options.rounds):
            for kind in options.kinds:
                environment = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8")
                if "expandable" in kind:
                    environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
                if "hook" in kind:
                    environment["LD_PRELOAD"] = options.hook
                command = [sys.executable, __file__, "--train", kind, *(["--graph"] if has_graph else [])]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
                if done.returncode != 0:
                    print(f"{kind}, graph {has_graph}: failed\n{done.stderr[-3000:]}", flush=True)
                    failed = True
                    continue
                found.setdefault(kind, []).append(json.loads(done.stdout.splitlines()[-1]))
        for kind, all_found in found.items():
            losses = {one["loss"] for one in all_found}
            step, plain = (statistics.median(one["step"] for one in found[which]) for which in (kind, "plain"))
            all_steps = " ".join(f"{one['step']:.0f}" for one in all_found)
            same = losses == {one["loss"] for one in found["plain"]}
            print(
                f"graph {has_graph}, {kind}: loss {sorted(losses)}, step {step:.0f} us ({all_steps}), {step / plain:.3f} of plain, "
                f"{'same loss' if same else 'OTHER LOSS'}",
                flush=True,
            )
            failed |= not same
    sys.exit(failed)


if __name__ == "__main__":
    main()
