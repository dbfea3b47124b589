"""Peers that end, memory that is withdrawn, and wrong input."""

import os
import re
import subprocess
import sys
import time

import pytest
from nixl import _bindings

from peers import DEADLINE, Memory, Notifications, complete, descriptors, pattern, start_agent, transfer


def connected(start_peer, parameters=None, size=1 << 20):
    here, there = start_agent("here", parameters), start_peer("there", parameters)
    memory, address = Memory(here, size, 1), there.call("register", size, 0)
    here.add_remote_agent(there.call("metadata"))
    transfer(here, "WRITE", [(memory.address, size)], [(address, size)], "there")
    return here, there, memory, address


def test_peer_that_is_killed_is_reported_and_others_continue(start_peer):
    here, there, memory, address = connected(start_peer, {"lost_after": "1"})
    other = start_peer("other")
    other_address = other.call("register", 4096, 0)
    here.add_remote_agent(other.call("metadata"))
    handle = here.initialize_xfer("WRITE", descriptors(here, memory.address, [(0, 1 << 20)]),
                                  descriptors(here, address, [(0, 1 << 20)]), "there")
    there.kill()
    begin = time.monotonic()
    # What was known of it becomes invalid with the failure.
    with pytest.raises((_bindings.nixlRemoteDisconnectError, _bindings.nixlNotFoundError)):
        while time.monotonic() < begin + DEADLINE:
            if here.transfer(handle) == "PROC":
                complete(here, handle)
    assert time.monotonic() - begin < 10
    here.release_xfer_handle(handle)
    with pytest.raises(Exception):
        here.send_notif("there", b"lost")
    transfer(here, "WRITE", [(memory.address, 4096)], [(other_address, 4096)], "other", b"goes on")
    assert other.call("when", "here", 1, -1) == ([b"goes on"], bytes([1]) * 4096)
    memory.deregister()


@pytest.mark.parametrize(
    "parameters", [{}, {"fabric": "=tcp", "source": "127.0.0.1", "lost_after": "1", "policy": "=fabric-direct"}]
)
def test_peer_that_is_killed_in_a_transfer_is_reported(start_peer, parameters):
    size = 64 << 20
    here, there, memory, address = connected(start_peer, parameters, size)
    handle = here.initialize_xfer("READ", descriptors(here, memory.address, [(0, size)]),
                                  descriptors(here, address, [(0, size)]), "there")
    here.transfer(handle)
    there.kill()
    begin = time.monotonic()
    try:
        state = complete(here, handle)
        # It had completed before.
        while state == "DONE" and time.monotonic() < begin + DEADLINE:
            state = here.transfer(handle)
            if state == "PROC":
                state = complete(here, handle)
    except (_bindings.nixlRemoteDisconnectError, _bindings.nixlNotFoundError):
        pass
    assert time.monotonic() - begin < 15
    here.release_xfer_handle(handle)
    memory.deregister()


def test_peer_that_starts_again_is_reached_with_new_metadata(start_peer):
    here, there, memory, address = connected(start_peer)
    for number in range(2):
        there.kill() if number else there.end()
        there = start_peer("there")
        address = there.call("register", 1 << 20, 0)
        here.remove_remote_agent("there")
        here.add_remote_agent(there.call("metadata"))
        memory.bytes[:] = pattern(1 << 20, number)
        transfer(here, "WRITE", [(memory.address, 1 << 20)], [(address, 1 << 20)], "there", b"again")
        assert there.call("when", "here", 1, -1) == ([b"again"], memory.bytes.tobytes())


def test_agent_that_ends_and_starts_again_is_received(start_peer):
    here = start_agent("here")
    received = Notifications(here)
    for number in range(2):
        peer = start_peer("there")
        peer.call("add", here.get_agent_metadata())
        peer.call("notify", "here", b"start %d" % number)
        assert received.take("there") == [b"start %d" % number]
        peer.end()


def test_memory_that_was_deregistered_is_not_reached(start_peer):
    here, there, memory, address = connected(start_peer)
    there.call("deregister", -1)
    handle = here.initialize_xfer("WRITE", descriptors(here, memory.address, [(0, 4096)]),
                                  descriptors(here, address, [(0, 4096)]), "there")
    with pytest.raises(_bindings.nixlNotFoundError):
        if here.transfer(handle) == "PROC":
            complete(here, handle)
    here.release_xfer_handle(handle)
    # The connection is not affected.
    address = there.call("register", 4096, 9)
    here.remove_remote_agent("there")
    here.add_remote_agent(there.call("metadata"))
    transfer(here, "READ", [(memory.address, 4096)], [(address, 4096)], "there")
    assert (memory.bytes[:4096] == 9).all()


def test_memory_is_deregistered_while_a_peer_has_a_route_to_it(two_agents):
    first, second = two_agents
    source, target = Memory(first, 4096, 1), Memory(second, 4096)
    first.add_remote_agent(second.get_agent_metadata())
    transfer(first, "WRITE", [(source.address, 4096)], [(target.address, 4096)], "second")
    begin = time.monotonic()
    target.deregister()
    assert time.monotonic() - begin < 1


def test_memory_is_registered_and_deregistered_many_times(two_processes):
    here, there, _ = two_processes
    for number in range(20):
        memory = Memory(here, 1 << 16, number)
        address = there.call("register", 1 << 16, 0)
        here.remove_remote_agent("there")
        here.add_remote_agent(there.call("metadata"))
        transfer(here, "WRITE", [(memory.address, 1 << 16)], [(address, 1 << 16)], "there")
        assert there.call("read", -1) == bytes([number]) * (1 << 16)
        memory.deregister()
        there.call("deregister", -1)


def test_without_a_path_the_refusal_says_why(start_peer, capfd):
    with pytest.raises(_bindings.nixlBackendError):
        connected(start_peer, {"fabric": "none", "policy": "=fabric-direct"})
    text = capfd.readouterr().err
    assert "no path" in text and "shared-memory" in text and "no provider in common" in text, text


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("rails", "0", "from 1 to 8"),
        ("rails", "many", "from 1 to 8"),
        ("timeout", "-1", "number of seconds"),
        ("timeout", "nan", "number of seconds"),
        ("lost_after", "1h", "number of seconds"),
        ("fabric", "=nonsense", "nonsense"),
        ("source", "nowhere", "nowhere"),
        ("directory", "/does/not/exist", "/does/not/exist"),
    ],
)
def test_wrong_parameter_is_refused_with_its_name(name, value, words, capfd):
    with pytest.raises(_bindings.nixlBackendError):
        start_agent("wrong", {name: value})
    assert words in capfd.readouterr().err


def test_unknown_parameter_is_ignored_with_a_warning(capfd):
    start_agent("warned", {"num_threads": "4"})
    assert '"num_threads" is unknown' in capfd.readouterr().err


def test_parameters_have_defaults():
    agent = start_agent("asked")
    assert agent.get_plugin_params("FABRICAST")["fabric"] == "auto"
    assert sorted(agent.get_backend_mem_types("FABRICAST")) == ["DRAM_SEG", "VRAM_SEG"]


def test_policy_restricts_the_path(start_peer, capfd):
    connected(start_peer, {"policy": "=fabric-direct"})
    with pytest.raises(_bindings.nixlBackendError):
        connected(start_peer, {"policy": "=cuda-ipc"})
    assert "no path" in capfd.readouterr().err


def test_metadata_with_wrong_bytes_does_no_harm(two_agents):
    first, second = two_agents
    target = Memory(second, 4096)
    source = Memory(first, 4096, 7)
    good = second.get_agent_metadata()
    random = pattern(20000, 8)
    first.remove_remote_agent("second")
    accepted = 0
    for number in range(300):
        wrong = bytearray(good)
        for change in range(1 + number % 3):
            index = 3 * (3 * number + change)
            wrong[int.from_bytes(random[index:index + 2].tobytes(), "little") % len(wrong)] ^= 1 << (random[index + 2] & 7)
        try:
            name = first.add_remote_agent(bytes(wrong))
        except Exception:
            continue
        accepted += 1
        try:
            transfer(first, "WRITE", [(source.address, 4096)], [(target.address, 4096)], name)
        except Exception:
            pass
        try:
            first.remove_remote_agent(name)
        except Exception:
            pass
    first.add_remote_agent(good)
    transfer(first, "WRITE", [(source.address, 4096)], [(target.address, 4096)], "second")
    assert (target.bytes == 7).all()


def test_memory_that_is_not_mapped_is_not_registered():
    agent = start_agent("careful")
    for address, length in [(4096, 4096), (1 << 46, 1 << 20)]:
        with pytest.raises(Exception):
            agent.register_memory([(address, length, 0, "")], "DRAM")


def test_unknown_agents_are_not_found(two_agents):
    first, _ = two_agents
    with pytest.raises(_bindings.nixlNotFoundError):
        first.send_notif("nobody", b"")


def virtual_functions(library, mangled):
    """The virtual functions of a class, in their order, without the name of the class."""
    text = subprocess.run(["readelf", "--relocs", "--symbols", "--dyn-syms", "--wide", library], check=True,
                          capture_output=True, text=True).stdout
    symbols = {}
    for symbol in re.finditer(r"^ *\d+: ([0-9a-f]+) +(\w+) (?:FUNC|OBJECT) .* (_Z\S+)$", text, re.MULTILINE):
        symbols[symbol[3]] = (int(symbol[1], 16), int(symbol[2], 0))
    start, size = symbols[f"_ZTV{mangled}"]
    by_address = {address: symbol for symbol, (address, _) in symbols.items()}
    found = {}
    for entry in re.finditer(r"^([0-9a-f]{16}) +\S+ +R_\w+ +(.*)$", text, re.MULTILINE):
        address = int(entry[1], 16)
        if start + 16 <= address < start + size:
            symbol = re.search(r"_Z\w+", entry[2])
            found[address] = symbol[0] if symbol else by_address[int(entry[2], 16)]
    assert len(found) == size // 8 - 2, found
    names = subprocess.run(["c++filt", *(found[address] for address in sorted(found))], check=True,
                           capture_output=True, text=True).stdout.splitlines()
    methods = [re.sub(r"^.*?Engine::", "", name) for name in names]
    return ["destructor" if method.startswith("~") else method for method in methods]


def test_virtual_functions_are_those_of_the_installed_nixl():
    """The headers at the build have the functions of the NIXL that runs, in the same order."""
    import nixl_cu12

    packages = os.path.dirname(os.path.dirname(nixl_cu12.__file__))
    plugins = os.path.join(packages, ".nixl_cu12.mesonpy.libs", "plugins")
    ours = os.path.join(os.environ.get("NIXL_PLUGIN_DIR", plugins), "libplugin_FABRICAST.so")
    theirs = virtual_functions(os.path.join(plugins, "libplugin_POSIX.so"), "15nixlPosixEngine")
    own = virtual_functions(ours, "N14fabricast_nixl6EngineE")
    assert len(theirs) > 20 and own == theirs


def test_child_of_a_fork_ends_while_the_agent_goes_on(start_peer):
    here, there, memory, address = connected(start_peer)
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(Exception):
                here.send_notif("there", b"from the child")
            del here, memory
        finally:
            os._exit(7)
    end = time.monotonic() + DEADLINE
    while (outcome := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < end, "the child hangs"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(outcome[1]) == 7
    transfer(here, "WRITE", [(memory.address, 4096)], [(address, 4096)], "there", b"goes on")
    assert there.call("when", "here", 1, None)[0] == [b"goes on"]


def test_environment_sets_parameters_that_are_not_passed():
    program = "from peers import start_agent; print(start_agent('x').get_plugin_params('FABRICAST')['rails'])"
    run = subprocess.run([sys.executable, "-c", program], env=os.environ | {"NIXL_FABRICAST_RAILS": "2"}, check=True,
                         capture_output=True, text=True, timeout=DEADLINE)
    assert run.stdout.split()[-1] == "2"
