"""The cost of clearing memory that passes between topics.

    python clearing.py [DEVICE]

Times loans of one topic, and of two that use the memory of one pool in turn: then each loan is of memory that
the other topic had. The memory is that of the host, or of the device, such as cuda:0.
"""

import statistics
import sys
import tempfile
import time

import fabricast


def measure(size, count, memory, number_of_topics):
    """The median time of a loan in microseconds."""
    with tempfile.TemporaryDirectory() as directory, fabricast.Node(directory) as node:
        topics = [
            node.topic(f"topic-{number}", memory=memory, largest=size, depth=1, loans=1) for number in range(2)
        ]
        ends = [(topic.publisher(), topic.subscriber()) for topic in topics]
        times = []
        for number in range(count):
            publisher, subscriber = ends[number % number_of_topics]
            begin = time.perf_counter_ns()
            loan = publisher.loan((size,))
            times.append(time.perf_counter_ns() - begin)
            loan.publish()
            subscriber.pull().release()
        return statistics.median(times[count // 10 :]) / 1000


def main():
    memory = sys.argv[1] if len(sys.argv) > 1 else "host"
    print(f"loans of {memory} memory, medians in microseconds")
    print(f"{'bytes':>9} {'one topic':>10} {'memory of another':>18}")
    for size in (64, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20):
        count = 400 if size <= 1 << 20 else 60
        rows = [[measure(size, count, memory, topics) for topics in (1, 2)] for _ in range(3)]
        one, two = (statistics.median(column) for column in zip(*rows))
        print(f"{size:>9} {one:>10.1f} {two:>18.1f}", flush=True)


if __name__ == "__main__":
    main()
