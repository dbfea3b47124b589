"""A camera publishes frames; readers take the newest ones at their own pace.

    python camera.py [--readers 8] [--frames 60]
"""

import argparse
import asyncio
import multiprocessing
import tempfile
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Semaphore

import fabricast
import numpy

SHAPE = (480, 640, 3)


async def read(directory: str, number: int, ready: Semaphore) -> tuple[int, int]:
    with fabricast.Node(directory) as node:
        subscriber = node.open("camera").subscriber()
        ready.release()
        seen = 0
        async for sample in subscriber.until_end():
            frame = numpy.asarray(sample.array)
            assert (frame[0, 0, 0] == frame[-1, -1, -1]) and frame.shape == SHAPE
            seen += 1
            await asyncio.sleep(0.001 * number)  # some readers are slow
        return seen, subscriber.missed


def reader(directory: str, number: int, ready: Semaphore, results: "Queue[tuple[int, int]]") -> None:
    results.put(asyncio.run(read(directory, number, ready)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--frames", type=int, default=60)
    options = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    ready = context.Semaphore(0)
    results: Queue[tuple[int, int]] = context.Queue()
    with tempfile.TemporaryDirectory() as directory, fabricast.Node(directory) as node:
        topic = node.topic("camera", dtype="uint8", shape=SHAPE, reliability="drop-oldest", depth=4)
        publisher = topic.publisher()
        readers = [
            context.Process(target=reader, args=(directory, number, ready, results))
            for number in range(options.readers)
        ]
        for process in readers:
            process.start()
        for _ in readers:
            assert ready.acquire(timeout=60)
        publisher.wait_for_subscribers(options.readers)
        for number in range(options.frames):
            with publisher.loan() as loan:
                loan.array[...] = number % 256
        publisher.close()
        for _ in readers:
            seen, missed = results.get(timeout=60)
            assert seen + missed == options.frames, (seen, missed)
        for process in readers:
            process.join()
    print(f"{options.frames} frames for {options.readers} readers: ok")


if __name__ == "__main__":
    main()
