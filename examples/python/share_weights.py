"""Processes share weights: one copy in memory, however many processes read it.

    python share_weights.py [--device emulated:0] [--readers 3]
"""

import argparse
import multiprocessing
from multiprocessing.queues import Queue

import fabricast
import numpy

ROWS, COLUMNS = 1024, 512


def reader(number: int, token: bytes, results: "Queue[tuple[int, float]]") -> None:
    weights = numpy.asarray(fabricast.open(token))  # no copy: the memory of the owner
    assert not weights.flags.writeable
    vector = numpy.full(COLUMNS, number, "float32")
    results.put((number, float((weights @ vector).sum())))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="host")
    parser.add_argument("--readers", type=int, default=3)
    options = parser.parse_args()

    weights = fabricast.allocate((ROWS, COLUMNS), "float32", device=options.device)
    weights[...] = numpy.random.default_rng(1).random((ROWS, COLUMNS), "float32")

    context = multiprocessing.get_context("spawn")
    results: Queue[tuple[int, float]] = context.Queue()
    with fabricast.share(weights, readonly=True) as shared:
        readers = [
            context.Process(target=reader, args=(number, shared.token, results)) for number in range(options.readers)
        ]
        for process in readers:
            process.start()
        found = dict(results.get(timeout=60) for _ in readers)
        for process in readers:
            process.join()
    total = float(numpy.asarray(weights).sum(dtype="float64"))
    for number, product in found.items():
        assert abs(product - number * total) <= 1e-4 * total * max(number, 1), (number, product, total)
    print(f"{options.readers} readers of {weights.nbytes >> 10} KiB on {options.device}: ok")


if __name__ == "__main__":
    main()
