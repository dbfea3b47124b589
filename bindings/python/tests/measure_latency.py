"""Latency of an array between processes, beside other libraries.

    python measure_latency.py [--bytes 1048576] [--rounds 300]

Two processes send an array back and forth; each touches all of its pages. Printed is the time of one way: half of a
round. All are measured in turn, in blocks, so that they see the same machine: topics of this library by a copy and by a
loan, multiprocessing.Queue, and, where they are installed, iceoryx2 (with its event) and zenoh.
"""

import argparse
import ctypes
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


class Topics:
    """`publish` copies the array once; a loan is written in place."""

    name = "fabricast"

    def __init__(self, directory, own, other, length, has_loan=False, waiting=None):
        self.node = fabricast.Node(directory, waiting=waiting)
        settings = {"largest": max(length, 1), "depth": 4}
        self.publisher = self.node.topic(f"{own}-{has_loan}-{waiting}", **settings).publisher()
        self.subscriber = self.node.topic(f"{other}-{has_loan}-{waiting}", **settings).subscriber()
        self.has_loan = has_loan

    def connect(self):
        self.publisher.wait_for_subscribers()

    def send(self, array):
        if self.has_loan:
            loan = self.publisher.loan(array.shape, "uint8")
            numpy.asarray(loan.array)[::4096] = 1
            loan.publish()
        else:
            self.publisher.publish(array)

    def receive(self):
        with self.subscriber.pull() as sample:
            touch(numpy.asarray(sample.array))


class Loans(Topics):
    name = "fabricast, loan"

    def __init__(self, *arguments):
        super().__init__(*arguments, has_loan=True)


class BusyLoans(Topics):
    """Both processes poll all the time: measured only by itself, since it takes two cores."""

    name = "fabricast, loan, busy"

    def __init__(self, *arguments):
        super().__init__(*arguments, has_loan=True, waiting="busy")


class Iceoryx2:
    """Publish and subscribe, and an event that wakes the other process."""

    name = "iceoryx2"

    def __init__(self, directory, own, other, length):
        import iceoryx2

        self.iceoryx2 = iceoryx2
        self.node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
        unique = directory.strip("/").replace("/", "-")

        def service(name):
            builder = self.node.service_builder(iceoryx2.ServiceName.new(f"{unique}/{name}"))
            return builder.publish_subscribe(iceoryx2.Slice[ctypes.c_uint8]).open_or_create()

        def event(name):
            return self.node.service_builder(iceoryx2.ServiceName.new(f"{unique}/{name}")).event().open_or_create()

        self.publisher = service(own).publisher_builder().initial_max_slice_len(length).create()
        self.subscriber = service(other).subscriber_builder().create()
        self.notifier = event(own).notifier_builder().create()
        self.listener = event(other).listener_builder().create()

    def connect(self):
        time.sleep(0.5)
        self.publisher.update_connections()

    def send(self, array):
        sample = self.publisher.loan_slice_uninit(array.size)
        ctypes.memmove(sample.payload_ptr, array.ctypes.data, array.size)
        sample.assume_init().send()
        self.notifier.notify()

    def receive(self):
        while True:
            sample = self.subscriber.receive()
            if sample is not None:
                payload = sample.payload()
                touch(numpy.frombuffer(payload.as_memory_view(), "uint8"))
                sample.delete()
                return
            self.listener.timed_wait(self.iceoryx2.Duration.from_millis(100))


class Zenoh:
    """Peers on loopback, without shared memory: what its package does by itself."""

    name = "zenoh"

    def __init__(self, directory, own, other, length):
        import zenoh

        config = zenoh.Config()
        config.insert_json5("scouting/multicast/enabled", "false")
        endpoint = f'["unixsock-stream{directory}/zenoh.sock"]'.replace("unixsock-stream", "unixsock-stream/")
        config.insert_json5("listen/endpoints" if own == "there" else "connect/endpoints", endpoint)
        config.insert_json5("mode", '"peer"')
        self.session = zenoh.open(config)
        self.publisher = self.session.declare_publisher(own)
        self.subscriber = self.session.declare_subscriber(other, zenoh.handlers.FifoChannel(4))

    def connect(self):
        time.sleep(1)

    def send(self, array):
        self.publisher.put(array.tobytes())

    def receive(self):
        touch(numpy.frombuffer(self.subscriber.recv().payload.to_bytes(), "uint8"))


class Queues:
    name = "multiprocessing.Queue"

    def __init__(self, queues, own, other, length):
        self.own, self.other = queues[own], queues[other]

    def connect(self):
        pass

    def send(self, array):
        self.own.put(array)

    def receive(self):
        touch(self.other.get())


def echo(kind, place, length, connection):
    side = kind(place, "back", "there", length)
    connection.send("ready")
    connection.recv()
    side.connect()
    array = numpy.ones(length, "uint8")
    connection.send("connected")
    for _ in range(connection.recv()):
        side.receive()
        side.send(array)
    connection.recv()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--only", nargs="*", default=None, help="names of classes")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    array = numpy.ones(options.bytes, "uint8")
    queues = {"there": context.Queue(), "back": context.Queue()}
    blocks = options.rounds // BLOCK + 1
    sides, times = {}, {}
    with tempfile.TemporaryDirectory() as directory:
        for kind in (Topics, Loans, BusyLoans, Queues, Iceoryx2, Zenoh):
            if kind.__name__ not in (options.only or ("Topics", "Loans", "Queues", "Iceoryx2", "Zenoh")):
                continue
            place = queues if kind is Queues else directory
            try:
                own = kind(place, "there", "back", options.bytes)
            except ImportError as error:
                print(f"without {kind.name}: {error}")
                continue
            here, there = context.Pipe()
            process = context.Process(target=echo, args=(kind, place, options.bytes, there))
            process.start()
            assert here.recv() == "ready"
            here.send("connect")
            own.connect()
            assert here.recv() == "connected"
            here.send(blocks * BLOCK)
            sides[kind.name], times[kind.name] = (own, here, process), []
        for block in range(blocks):
            for name, (side, _, _) in sides.items():
                for _ in range(BLOCK):
                    begin = time.perf_counter()
                    side.send(array)
                    side.receive()
                    if block > 0:
                        times[name].append((time.perf_counter() - begin) / 2 * 1e6)
        for _, connection, process in sides.values():
            connection.send("end")
            process.join(30)
        base = statistics.median(times[next(iter(times))])
        for name, all_times in times.items():
            all_times.sort()
            median = statistics.median(all_times)
            print(
                f"{options.bytes} bytes, {name:<22} p50 {median:9.1f} us  p99 {all_times[len(all_times) * 99 // 100]:9.1f} us"
                f"  {median / base:6.1f} times the first"
            )


if __name__ == "__main__":
    main()
