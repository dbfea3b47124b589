"""What a program sees when it loads the library, joins a node, and uses a fabric for the first time.

    loading.py LIBRARY

Each situation is a separate process with its own node: signal handlers are checked in
/proc/self/status, and by the effect of Ctrl-C and of a crash.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time

LONG = 60 * 10**9
LIMIT = 60  # seconds for a process
INTERRUPTED = -22
MOST_MILLISECONDS = 50


class Options(ctypes.Structure):
    """fabricast_node_options of the first version of the interface."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("directory", ctypes.c_char_p),
        ("label", ctypes.c_char_p),
        ("service_timeout", ctypes.c_int64),
        ("host_budget", ctypes.c_uint64),
        ("device_budget", ctypes.c_uint64),
        ("service", ctypes.c_uint32),
        ("waiting", ctypes.c_uint32),
        ("listen", ctypes.c_char_p),
        ("others", ctypes.c_void_p * 5),  # peers, rendezvous, name, provider, source
        ("lost_after", ctypes.c_int64),
        ("insecure", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
    ]


class AgentOptions(ctypes.Structure):
    """fabricast_agent_options of the first version of the interface."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("label", ctypes.c_char_p),
        ("directory", ctypes.c_char_p),
        ("fabric", ctypes.c_char_p),
        ("source", ctypes.c_char_p),
        ("lost_after", ctypes.c_int64),
        ("cached_bytes", ctypes.c_uint64),
        ("cached_count", ctypes.c_uint32),
        ("rails", ctypes.c_uint32),
        ("waiting", ctypes.c_uint32),
        ("force_remote", ctypes.c_uint32),
    ]


def status(name):
    with open("/proc/self/status") as lines:
        return next(line.split()[1] for line in lines if line.startswith(name + ":"))


def host():
    """State that loading must not change. The C library uses two signals for its threads."""
    own = 1 << 32 - 1 | 1 << 33 - 1
    masks = [int(status(name), 16) & ~own for name in ("SigCgt", "SigIgn", "SigBlk")]
    return masks, [signal.getsignal(number) for number in signal.valid_signals()]


def libraries():
    with open("/proc/self/maps") as lines:
        return lines.read()


def load():
    library = ctypes.CDLL(os.environ["LIBRARY"])
    library.fabricast_error_message.restype = ctypes.c_char_p
    return library


def join(library, listen=None):
    """Joins a node; returns it, or None and the error."""
    options, node = Options(), ctypes.c_void_p()
    assert library.fabricast_node_options_init(ctypes.byref(options), ctypes.c_size_t(ctypes.sizeof(options))) == 0
    options.listen, options.insecure = listen, int(listen is not None)
    if library.fabricast_node_join(ctypes.byref(options), ctypes.byref(node)) != 0:
        return None, library.fabricast_error_message().decode()
    return node, ""


def send(library, node):
    """Publishes a message and reads it."""
    topic, publisher, subscriber, sample = (ctypes.c_void_p() for _ in range(4))
    settings = (ctypes.c_char * 64)()
    assert library.fabricast_topic_settings_init(settings, ctypes.c_size_t(40)) == 0
    assert library.fabricast_topic_open(node, b"loading", settings, ctypes.byref(topic)) == 0
    assert library.fabricast_subscriber_open(topic, ctypes.byref(subscriber)) == 0
    assert library.fabricast_publisher_open(topic, ctypes.byref(publisher)) == 0
    length = ctypes.c_size_t(5)
    assert library.fabricast_publisher_push(publisher, b"hello", length, ctypes.c_int64(LONG)) == 0
    assert library.fabricast_subscriber_pull(subscriber, ctypes.c_int64(LONG), ctypes.byref(sample)) == 0
    assert library.fabricast_sample_release(sample) == 0
    for close, handle in (("subscriber", subscriber), ("publisher", publisher), ("topic", topic)):
        assert getattr(library, f"fabricast_{close}_close")(handle) == 0


def start_agent(library, fabric=None):
    """Starts an agent; returns it, or None and the error."""
    options, agent = AgentOptions(), ctypes.c_void_p()
    assert library.fabricast_agent_options_init(ctypes.byref(options), ctypes.c_size_t(ctypes.sizeof(options))) == 0
    options.directory, options.fabric = os.environ["FABRICAST_DIRECTORY"].encode(), fabric
    options.source = fabric and b"127.0.0.1"
    if library.fabricast_agent_start(ctypes.byref(options), ctypes.byref(agent)) != 0:
        return None, library.fabricast_error_message().decode()
    return agent, ""


def use_fabric(library):
    node, why = join(library, b"127.0.0.1:0")
    assert node is not None, why
    assert "libfabric.so" in libraries()
    return node


# ------------------------------------------------------------------------- situations


def loading_changes_nothing():
    before, threads, start = host(), status("Threads"), time.perf_counter()
    load()
    print(time.perf_counter() - start)
    assert host() == before, (before, host())
    assert status("Threads") == threads
    assert "libfabric.so" not in libraries()


def local_topics_need_no_fabric():
    before, library = host(), load()
    node, why = join(library)
    assert node is not None, why
    send(library, node)
    assert library.fabricast_node_leave(node) == 0
    assert host() == before, (before, host())
    assert "libfabric.so" not in libraries()


def local_agents_need_no_fabric():
    before, library = host(), load()
    agent, why = start_agent(library)
    assert agent is not None, why
    assert library.fabricast_agent_close(agent, ctypes.c_int64(LONG)) == 0
    assert host() == before, (before, host())
    assert "libfabric.so" not in libraries()


def a_fabric_of_an_agent_changes_no_handlers():
    before, library = host(), load()
    agent, why = start_agent(library, b"auto")
    assert agent is not None, why
    assert "libfabric.so" in libraries()
    assert host() == before, (before, host())
    assert library.fabricast_agent_close(agent, ctypes.c_int64(LONG)) == 0


def a_fabric_changes_no_handlers():
    before, library = host(), load()
    node = use_fabric(library)
    assert host() == before, (before, host())
    send(library, node)
    assert library.fabricast_node_leave(node) == 0
    assert host() == before, (before, host())


def interrupted():
    library = load()
    use_fabric(library)
    try:
        print("ready", flush=True)
        time.sleep(LIMIT)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        print("finally", flush=True)


def interrupted_while_it_pulls():
    """Ctrl-C while Python is in a call that waits forever."""
    import threading

    library = load()
    node, why = join(library)
    assert node is not None, why
    topic, subscriber, sample = (ctypes.c_void_p() for _ in range(3))
    settings = (ctypes.c_char * 64)()
    assert library.fabricast_topic_settings_init(settings, ctypes.c_size_t(40)) == 0
    assert library.fabricast_topic_open(node, b"loading", settings, ctypes.byref(topic)) == 0
    assert library.fabricast_subscriber_open(topic, ctypes.byref(subscriber)) == 0
    began = []

    def ready():
        began.append(time.monotonic())
        print("ready", flush=True)

    # By then the main thread blocks in the call.
    threading.Timer(0.5, ready).start()
    try:
        while library.fabricast_subscriber_pull(subscriber, ctypes.c_int64(-1), ctypes.byref(sample)) == INTERRUPTED:
            print("called again", flush=True)
    except KeyboardInterrupt:
        took = time.monotonic() - began[0]
        print("interrupted", flush=True)
        assert took < 1, took


def terminated():
    library = load()
    use_fabric(library)
    print("ready", flush=True)
    time.sleep(LIMIT)


def crashed():
    import faulthandler

    faulthandler.enable()
    library = load()
    use_fabric(library)
    ctypes.string_at(8)


def without_libfabric():
    library = load()
    node, why = join(library)
    assert node is not None, why
    send(library, node)
    assert library.fabricast_node_leave(node) == 0
    node, why = join(library, b"127.0.0.1:0")
    assert node is None
    assert "libfabric cannot be loaded (" in why and "libfabric.so.1: file too short" in why, why
    assert "Reinstall it with apt install --reinstall libfabric1" in why, why
    agent, why = start_agent(library, b"auto")
    assert agent is None
    assert "libfabric cannot be loaded (" in why, why


# ----------------------------------------------------------------------------- running


def environment(directory, **more):
    others = {name: value for name, value in os.environ.items() if not name.startswith("FABRICAST_")}
    return {**others, "FABRICAST_DIRECTORY": directory, "LIBRARY": LIBRARY, **more}


def start(situation, directory, **more):
    return subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "--situation", situation.__name__],
        env=environment(directory, **more), cwd=directory, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )


def run(situation, code=0, when_ready=None, **more):
    """Runs the program, and returns its standard output and standard error."""
    with tempfile.TemporaryDirectory(prefix="fabricast-loading-") as directory:
        process = start(situation, directory, **more)
        first = ""
        if when_ready is not None:
            first = process.stdout.readline()
            process.send_signal(when_ready)
        out, err = process.communicate(timeout=LIMIT)
        assert process.returncode == code, f"{situation.__name__}: {process.returncode}\n{out}{err}"
        left = [name for name in os.listdir(directory) if name.endswith(".btr")]
        assert not left, f"{situation.__name__} left {left}"
        return first + out, err


def main():
    # Other processes run at the same time: the fastest attempt counts.
    seconds = min(float(run(loading_changes_nothing)[0]) for _ in range(7))
    assert seconds * 1000 <= MOST_MILLISECONDS, f"loading takes {seconds * 1000:.1f} ms"
    run(local_topics_need_no_fabric)
    run(local_agents_need_no_fabric)
    run(a_fabric_changes_no_handlers)
    run(a_fabric_of_an_agent_changes_no_handlers)
    out, _ = run(interrupted, when_ready=signal.SIGINT)
    assert out.split() == ["ready", "interrupted", "finally"], out
    out, _ = run(interrupted_while_it_pulls, when_ready=signal.SIGINT)
    assert out.split() == ["ready", "interrupted"], out
    run(terminated, code=-signal.SIGTERM, when_ready=signal.SIGTERM)
    _, err = run(crashed, code=-signal.SIGSEGV)
    assert "Fatal Python error: Segmentation fault" in err, err
    # The run-time linker finds a file that is not a library.
    with tempfile.TemporaryDirectory() as directory:
        open(os.path.join(directory, "libfabric.so.1"), "w").close()
        path = os.pathsep.join(filter(None, [directory, os.environ.get("LD_LIBRARY_PATH")]))
        run(without_libfabric, LD_LIBRARY_PATH=path)
    print(f"loading: ok, in {seconds * 1000:.1f} ms")


if sys.argv[1] == "--situation":
    globals()[sys.argv[2]]()
else:
    LIBRARY = os.path.abspath(sys.argv[1])
    main()
