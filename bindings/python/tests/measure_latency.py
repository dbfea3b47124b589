"""Latency of an array between processes, beside that of `multiprocessing.Queue`.

    python measure_latency.py [--bytes 1048576] [--rounds 300]

Two processes send an array back and forth; each touches all of its pages. Printed is the time of one way: half of a
round. The two are measured in turn, so that both see the same machine.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time

import fabricast
import numpy

BLOCK = 20


def touch(array):
    """Reads one byte of each page."""
    return int(array[::4096].sum())


def echo_by_topics(directory, ready):
    with fabricast.Node(directory) as node:
        publisher, subscriber = node.open("back").publisher(), node.open("there").subscriber()
        ready.set()
        for sample in subscriber:
            array = numpy.asarray(sample.array)
            if array.size == 0:
                return
            touch(array)
            publisher.publish(array)
            del array, sample


def echo_by_queues(there, back):
    while (array := there.get()) is not None:
        touch(array)
        back.put(array)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    array = numpy.arange(options.bytes, dtype="uint8")
    with tempfile.TemporaryDirectory() as directory, fabricast.Node(directory) as node:
        settings = {"largest": max(options.bytes, 1), "depth": 4}
        publisher = node.topic("there", **settings).publisher()
        subscriber = node.topic("back", **settings).subscriber()
        ready = context.Event()
        echoes = [context.Process(target=echo_by_topics, args=(directory, ready))]
        there, back = context.Queue(), context.Queue()
        echoes.append(context.Process(target=echo_by_queues, args=(there, back)))
        for echo in echoes:
            echo.start()
        ready.wait(30)

        def by_topics():
            publisher.publish(array)
            with subscriber.pull() as sample:
                touch(numpy.asarray(sample.array))

        def by_queues():
            there.put(array)
            touch(back.get())

        times = {by_topics: [], by_queues: []}
        for block in range(options.rounds // BLOCK + 1):
            for way in times:
                for _ in range(BLOCK):
                    begin = time.perf_counter()
                    way()
                    if block > 0:
                        times[way].append((time.perf_counter() - begin) / 2 * 1e6)
        publisher.publish(b"")
        there.put(None)
        for echo in echoes:
            echo.join(30)
    medians = []
    for way, all in times.items():
        all.sort()
        medians.append(statistics.median(all))
        print(f"{way.__name__:<10} p50 {medians[-1]:9.1f} us  p99 {all[len(all) * 99 // 100]:9.1f} us")
    print(f"{options.bytes} bytes: multiprocessing.Queue takes {medians[1] / medians[0]:.1f} times as long")


if __name__ == "__main__":
    main()
