"""A loader publishes batches; trainers read each of them where it is, in one copy.

    python loader.py [--trainers 4] [--batches 20] [--memory host]
"""

import argparse
import multiprocessing
import tempfile
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Semaphore

import fabricast
import numpy

BATCH = (32, 3, 64, 64)


def trainer(directory: str, results: "Queue[tuple[int, float]]", ready: Semaphore) -> None:
    with fabricast.Node(directory) as node:
        subscriber = node.open("batches").subscriber()
        ready.release()
        steps, total = 0, 0.0
        for sample in subscriber:
            if sample.metadata == b"end of epoch":
                break
            images = numpy.asarray(sample.array)  # PyTorch: torch.from_dlpack(sample.array)
            steps, total = steps + 1, total + float(images[:, 0, 0, 0].sum())
            del images, sample
        results.put((steps, total))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--memory", default="host")
    options = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    ready = context.Semaphore(0)
    results: Queue[tuple[int, float]] = context.Queue()
    with tempfile.TemporaryDirectory() as directory, fabricast.Node(directory) as node:
        topic = node.topic("batches", dtype="float32", shape=BATCH, memory=options.memory, depth=4)
        publisher = topic.publisher()
        trainers = [
            context.Process(target=trainer, args=(directory, results, ready)) for _ in range(options.trainers)
        ]
        for process in trainers:
            process.start()
        for _ in trainers:
            assert ready.acquire(timeout=60)
        publisher.wait_for_subscribers(options.trainers)
        expected = 0.0
        for number in range(options.batches):
            with publisher.loan() as loan:  # the loader writes the batch where the trainers read it
                loan.array[...] = number
            expected += number * BATCH[0]
        with publisher.loan() as loan:
            loan.publish(metadata=b"end of epoch")
        for _ in trainers:
            assert results.get(timeout=60) == (options.batches, expected)
        for process in trainers:
            process.join()
    print(f"{options.batches} batches, read by {options.trainers} trainers from one copy: ok")


if __name__ == "__main__":
    main()
