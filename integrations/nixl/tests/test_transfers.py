"""Transfers and notifications, with a check of all bytes."""

import pathlib
import subprocess
import sys
import threading

import numpy
import pytest
from nixl._api import nixl_thread_sync_t

from peers import DEADLINE, Memory, Notifications, complete, descriptors, pattern, start_agent, transfer

SIZES = [1, 7, 64, 4095, 4096, 65537, 1 << 20, (8 << 20) + 3]


def refresh(here, there):
    """Exchanges what was registered since."""
    here.remove_remote_agent("there")
    here.add_remote_agent(there.call("metadata"))


def test_put_and_get_of_many_sizes_between_processes(two_processes):
    here, there, _ = two_processes
    memories = [Memory(here, max(SIZES)), Memory(here, max(SIZES))]
    address = there.call("register", max(SIZES), 0)
    refresh(here, there)
    for seed, size in enumerate(SIZES):
        data = pattern(size, seed)
        memories[0].bytes[:size] = data
        message = f"put {size}".encode()
        transfer(here, "WRITE", [(memories[0].address, size)], [(address, size)], "there", message)
        messages, found = there.call("when", "here", 1, -1)
        assert messages == [message]
        assert found[:size] == data.tobytes()
        memories[1].bytes[:] = 0
        transfer(here, "READ", [(memories[1].address, size)], [(address, size)], "there")
        assert (memories[1].bytes[:size] == data).all()
        assert not memories[1].bytes[size:].any()
    for memory in memories:
        memory.deregister()
    there.call("deregister", -1)


def test_bytes_are_there_when_the_notification_is(two_processes):
    here, there, _ = two_processes
    size = 4 << 20
    source = Memory(here, size)
    address = there.call("register", size, 0)
    refresh(here, there)
    for seed in range(20):
        data = pattern(size, seed)
        source.bytes[:] = data
        there.ask("when", "here", 1, -1)
        transfer(here, "WRITE", [(source.address, size)], [(address, size)], "there", b"x" * (1 + seed * 10))
        messages, found = there.answer()
        assert messages == [b"x" * (1 + seed * 10)]
        assert found == data.tobytes()
    source.deregister()
    there.call("deregister", -1)


def test_many_blocks_of_several_regions_are_one_transfer(two_processes):
    here, there, _ = two_processes
    regions, size, block = 4, 1 << 20, 512
    sources = [Memory(here, size) for _ in range(regions)]
    addresses = [there.call("register", size, 0) for _ in range(regions)]
    refresh(here, there)
    random = numpy.random.default_rng(1)
    blocks = [(region, start) for region in range(regions) for start in range(0, size, block)]
    targets = [blocks[index] for index in random.permutation(len(blocks))]
    expected = numpy.zeros((regions, size), dtype=numpy.uint8)
    for region, source in enumerate(sources):
        source.bytes[:] = pattern(size, region)
    for (region, start), (to, place) in zip(blocks, targets):
        expected[to, place:place + block] = sources[region].bytes[start:start + block]
    local = [(sources[region].address + start, block) for region, start in blocks]
    remote = [(addresses[to] + place, block) for to, place in targets]
    there.ask("when", "here", 1, -1)
    transfer(here, "WRITE", local, remote, "there", b"all of it")
    messages, last = there.answer()
    assert messages == [b"all of it"]
    assert last == expected[-1].tobytes()
    for region in range(regions):
        assert there.call("read", region - regions) == expected[region].tobytes()
    # And back.
    for source in sources:
        source.bytes[:] = 0
    transfer(here, "READ", local, remote, "there")
    for region, source in enumerate(sources):
        assert (source.bytes == pattern(size, region)).all()
    for source in sources:
        source.deregister()
    for _ in range(regions):
        there.call("deregister", -1)


def test_transfer_is_posted_repeatedly_with_other_notifications(two_processes):
    here, there, _ = two_processes
    source = Memory(here, 4096)
    address = there.call("register", 4096, 0)
    refresh(here, there)
    handle = here.initialize_xfer("WRITE", descriptors(here, source.address, [(0, 4096)]),
                                  descriptors(here, address, [(0, 4096)]), "there")
    for number in range(50):
        source.bytes[:] = number
        if here.transfer(handle, f"round {number}".encode()) == "PROC":
            assert complete(here, handle) == "DONE"
        messages, found = there.call("when", "here", 1, -1)
        assert messages == [f"round {number}".encode()]
        assert found == bytes([number]) * 4096
    here.release_xfer_handle(handle)
    source.deregister()
    there.call("deregister", -1)


def test_transfer_that_is_released_in_flight_ends_before_its_memory(two_processes):
    here, there, _ = two_processes
    size = 16 << 20
    source = Memory(here, size, 5)
    address = there.call("register", size, 0)
    refresh(here, there)
    handle = here.initialize_xfer("WRITE", descriptors(here, source.address, [(0, size)]),
                                  descriptors(here, address, [(0, size)]), "there")
    here.transfer(handle)
    here.release_xfer_handle(handle)
    source.deregister()
    source.bytes[:] = 6
    assert there.call("read", -1) == bytes([5]) * size
    there.call("deregister", -1)


def test_put_and_get_within_a_process(two_agents):
    first, second = two_agents
    received = Notifications(second)
    source, target = Memory(first, 1 << 20), Memory(second, 1 << 20)
    first.add_remote_agent(second.get_agent_metadata())
    source.bytes[:] = pattern(1 << 20, 3)
    transfer(first, "WRITE", [(source.address, 1 << 20)], [(target.address, 1 << 20)], "second", b"here")
    assert received.take("first") == [b"here"]
    assert (target.bytes == source.bytes).all()
    target.bytes[:] = pattern(1 << 20, 4)
    transfer(first, "READ", [(source.address, 1 << 20)], [(target.address, 1 << 20)], "second")
    assert (source.bytes == pattern(1 << 20, 4)).all()


def test_agent_transfers_to_itself():
    agent = start_agent("alone")
    source, target = Memory(agent, 1 << 16), Memory(agent, 1 << 16)
    source.bytes[:] = pattern(1 << 16, 5)
    blocks = [(start, 256) for start in range(0, 1 << 16, 512)]
    transfer(agent, "WRITE", [(source.address + start, length) for start, length in blocks],
             [(target.address + start, length) for start, length in blocks], "alone", b"to myself")
    agent.send_notif("alone", b"again")
    assert Notifications(agent).take("alone", 2) == [b"to myself", b"again"]
    for start, length in blocks:
        assert (target.bytes[start:start + length] == source.bytes[start:start + length]).all()
        assert not target.bytes[start + length:start + 2 * length].any()


@pytest.mark.parametrize("thread", [True, False])
def test_notifications_of_any_length_arrive_in_order(thread):
    first, second = (start_agent(name, enable_prog_thread=thread) for name in ("first", "second"))
    first.add_remote_agent(second.get_agent_metadata())
    received = Notifications(second)
    lengths = [0, 1, 63, 64, 65, 128, 1000, 4096, 5000, 40000]
    sent = [pattern(length, length).tobytes() for length in lengths] + [b"%d" % number for number in range(300)]
    for message in sent:
        first.send_notif("second", message)
        # Without a thread, both make progress in their own calls.
        first.get_new_notifs()
        received.poll()
    for message in sent:
        first.get_new_notifs()
        assert received.take("first") == [message]


def test_longest_notification_arrives_and_a_longer_one_is_refused(two_processes):
    here, there, _ = two_processes
    message = pattern(1 << 20, 6).tobytes()
    there.ask("when", "here", 1, None)
    here.send_notif("there", message)
    assert there.answer()[0] == [message]
    with pytest.raises(Exception, match="INVALID_PARAM"):
        here.send_notif("there", message + b"x")


def test_names_of_any_length_and_bytes_are_those_of_notifications():
    name = "präfix/" * 60 + "\x01 end"
    first, second = start_agent(name), start_agent("second")
    first.add_remote_agent(second.get_agent_metadata())
    first.send_notif("second", b"hello")
    assert Notifications(second).take(name) == [b"hello"]


def test_three_agents_transfer_to_each_other(start_peer):
    # Names of the agents to addresses.
    peers = {name: start_peer(name) for name in ("one", "two", "three")}
    addresses = {name: peer.call("register", 4096 * 3, index + 1) for index, (name, peer) in enumerate(peers.items())}
    metadata = {name: peer.call("metadata") for name, peer in peers.items()}
    for name, peer in peers.items():
        for other in peers:
            if other != name:
                peer.call("add", metadata[other])
    # Each puts into the part of the others that has its number.
    for index, (name, peer) in enumerate(peers.items()):
        for other in peers:
            if other != name:
                peer.ask("transfer", "WRITE", [(addresses[name] + 4096 * index, 4096)],
                         [(addresses[other] + 4096 * index, 4096)], other, f"from {name}".encode())
                peer.answer()
    for name, peer in peers.items():
        for other in peers:
            if other != name:
                assert peer.call("when", other, 1, None)[0] == [f"from {other}".encode()]
        assert peer.call("read", 0) == b"".join(bytes([index + 1]) * 4096 for index in range(3))


def test_both_directions_at_once(two_processes):
    here, there, received = two_processes
    size = 1 << 20
    ours = Memory(here, size, 1)
    address = there.call("register", size, 2)
    other = there.call("register", size, 3)
    mine = Memory(here, size, 4)
    refresh(here, there)
    there.call("add", here.get_agent_metadata())
    for number in range(10):
        there.ask("transfer", "WRITE", [(other, size)], [(mine.address, size)], "here", b"%d" % number)
        transfer(here, "WRITE", [(ours.address, size)], [(address, size)], "there", b"%d" % number)
        there.answer()
        assert received.take("there") == [b"%d" % number]
        assert there.call("when", "here", 1, None)[0] == [b"%d" % number]
    assert (mine.bytes == 3).all()
    assert there.call("read", -2) == bytes([1]) * size
    for memory in (ours, mine):
        memory.deregister()
    there.call("deregister", -1)
    there.call("deregister", -1)


def test_threads_transfer_and_notify_at_once(start_peer):
    threads, rounds, size = 4, 50, 1 << 16
    here = start_agent("here", sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_RW)
    there = start_peer("there")
    sources = [Memory(here, size, number + 1) for number in range(threads)]
    addresses = [there.call("register", size, 0) for _ in range(threads)]
    here.add_remote_agent(there.call("metadata"))
    failures = []

    def work(number):
        try:
            for index in range(rounds):
                transfer(here, "WRITE", [(sources[number].address, size)], [(addresses[number], size)], "there",
                         b"%d put %d" % (number, index))
                here.send_notif("there", b"%d sent %d" % (number, index) + b"." * 200)
        except Exception as error:
            failures.append(error)

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(DEADLINE)
    assert not failures and not any(thread.is_alive() for thread in running)
    received = there.call("when", "here", 2 * threads * rounds, None)[0]
    for number in range(threads):
        sent = [message for message in received if message.startswith(b"%d sent " % number)]
        assert sent == [b"%d sent %d" % (number, index) + b"." * 200 for index in range(rounds)]
        assert there.call("read", number) == bytes([number + 1]) * size
    assert sorted(message for message in received if b" put " in message) == sorted(
        b"%d put %d" % (number, index) for number in range(threads) for index in range(rounds))


def test_program_of_the_documentation():
    page = pathlib.Path(__file__).parents[3] / "docs" / "how-to" / "nixl.md"
    program = page.read_text().split("```python\n", 1)[1].split("```", 1)[0]
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE)


@pytest.mark.parametrize("strided", [False, True])
def test_prepared_lists_are_used_by_index(two_processes, strided):
    here, there, _ = two_processes
    regions, count, block = 3, 64, 4096
    sources = [Memory(here, 2 * count * block) for _ in range(regions)]
    addresses = [there.call("register", 2 * count * block, 0) for _ in range(regions)]
    refresh(here, there)
    for number, source in enumerate(sources):
        source.bytes[:] = pattern(source.bytes.size, number)

    def prepare(name, starts):
        if strided:
            rows = [(start, block, 0, 2 * block, count) for start in starts]
        else:
            rows = [(start + 2 * block * index, block, 0) for start in starts for index in range(count)]
        return here.prep_xfer_dlist(name, numpy.array(rows, dtype=numpy.uint64), "DRAM")

    local = prepare("NIXL_INIT_AGENT", [source.address for source in sources])
    remote = prepare("there", addresses)
    # Every third block, of all regions, to the places in the opposite order.
    chosen = numpy.arange(0, regions * count, 3, dtype=numpy.int32)
    handle = here.make_prepped_xfer("WRITE", local, chosen, remote, chosen[::-1].copy(), b"pages")
    assert here.transfer(handle) == "DONE" or complete(here, handle) == "DONE"
    assert there.call("when", "here", 1, None)[0] == [b"pages"]
    here.release_xfer_handle(handle)
    expected = numpy.zeros((regions, 2 * count, block), dtype=numpy.uint8)
    for index, place in zip(chosen, chosen[::-1]):
        data = sources[index // count].bytes.reshape(2 * count, block)[2 * (index % count)]
        expected[place // count, 2 * (place % count)] = data
    for number in range(regions):
        assert there.call("read", number - regions) == expected[number].tobytes()
    here.release_dlist_handle(local)
    here.release_dlist_handle(remote)
    for source in sources:
        source.deregister()
        there.call("deregister", -1)
