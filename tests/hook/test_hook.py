"""Unmodified programs with the preloaded hook, on a driver without a GPU.

    HOOK=…/libfabricast_hook.so FAKE_CUDA=DIRECTORY pytest tests/hook
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

HERE = pathlib.Path(__file__).parent
MEBI = 1 << 20
NOBODY = 65534


def copy_for_others(path, directory):
    copy = directory / "copies" / pathlib.Path(path).name
    if not copy.exists():
        copy.parent.mkdir(exist_ok=True)
        copy.parent.chmod(0o755)
        if os.path.isdir(path):
            shutil.copytree(path, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, copy)
        subprocess.run(["chmod", "-R", "a+rX", str(copy)], check=True)
    return copy


class Program:
    """A process that runs a program, and talks in lines."""

    def __init__(self, body, directory, preload=True, user=None, **variables):
        hook, driver, here, python = os.environ["HOOK"], os.environ["FAKE_CUDA"], str(HERE), sys.executable
        if user is not None:
            # Another user may not see the directories of this one.
            python = shutil.which("python3", path="/usr/bin:/bin") or python
            hook, driver, here = [str(copy_for_others(path, directory)) for path in (hook, driver, here)]
        environment = dict(
            os.environ, LD_LIBRARY_PATH=driver, PYTHONPATH=here, FABRICAST_DIRECTORY=str(directory),
            PYTHONDONTWRITEBYTECODE="1", **variables,
        )
        if preload:
            environment["LD_PRELOAD"] = hook
        source = "from side import *\nimport os, sys, threading\nMEBI = 1 << 20\n" + textwrap.dedent(body)
        self.process = subprocess.Popen(
            [python, "-c", source], env=environment, cwd="/", text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            user=user, group=user,
        )

    def hear(self):
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(10)}"
        return line.rstrip("\n")

    def say(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def ask(self, line):
        self.say(line)
        return self.hear()

    def finish(self):
        self.process.stdin.close()
        assert self.process.wait(20) == 0


@pytest.fixture
def start(tmp_path):
    started = []

    def run(body, **options):
        started.append(Program(body, tmp_path, **options))
        return started[-1]

    yield run
    for program in started:
        program.process.kill()
        program.process.wait()


OWNER = """
    address = malloc(4 * MEBI)
    fill(address, 4 * MEBI, 7)
    print(export(address).hex(), flush=True)
    for line in sys.stdin:
        match line.strip():
            case "read": print(memory(address, 4 * MEBI)[4 * MEBI - 1], flush=True)
            case "free": free(address); print("freed", flush=True)
            case "used": print(used(), flush=True)
"""
RECEIVER = """
    address = open_handle(bytes.fromhex(input()))
    print(memory(address, 4 * MEBI)[4 * MEBI - 1], flush=True)
    for line in sys.stdin:
        match line.strip():
            case "write": fill(address, 4 * MEBI, 9); print("written", flush=True)
            case "read": print(memory(address, 4 * MEBI)[4 * MEBI - 1], flush=True)
            case "close": close_handle(address); print("closed", flush=True)
"""


@pytest.mark.parametrize("preload", [True, False])
def test_processes_share_a_block(start, preload):
    owner, receiver = start(OWNER, preload=preload), start(RECEIVER, preload=preload)
    handle = owner.hear()
    assert bytes.fromhex(handle).startswith(b"FcTK") == preload
    assert receiver.ask(handle) == "7"
    assert receiver.ask("write") == "written" and owner.ask("read") == "9"
    assert receiver.ask("close") == "closed"
    owner.finish()
    receiver.finish()


def test_processes_with_and_without_the_hook_share_what_both_know(start):
    owner, receiver = start(OWNER, preload=False), start(RECEIVER)
    assert receiver.ask(owner.hear()) == "7"
    receiver.finish()


def test_freed_block_stays_with_processes_that_opened_it(start):
    owner, receiver = start(OWNER), start(RECEIVER)
    assert receiver.ask(owner.hear()) == "7"
    assert owner.ask("free") == "freed"
    assert int(owner.ask("used")) == 4 * MEBI and receiver.ask("read") == "7"
    assert receiver.ask("close") == "closed"
    for _ in range(100):
        if int(owner.ask("used")) == 0:
            return
        # A thread of the owner releases it, which waits for a core on a busy machine.
        time.sleep(0.01)
    pytest.fail("the memory was not released")


def test_block_outlives_a_killed_owner(start):
    owner, receiver, late = start(OWNER), start(RECEIVER), start(
        """
        handle = bytes.fromhex(input())
        try:
            open_handle(handle)
        except Failed as failed:
            print("failed", failed, flush=True)
        """
    )
    handle = owner.hear()
    assert receiver.ask(handle) == "7"
    owner.process.send_signal(signal.SIGKILL)
    owner.process.wait()
    assert receiver.ask("read") == "7"
    assert late.ask(handle) == "failed 400"


def test_short_blocks_and_other_failures_are_left_to_the_original(start):
    program = start(
        """
        short, long = malloc(MEBI - 1), malloc(MEBI)
        print([export(it)[:4] == b"FcTK" for it in (short, long)], flush=True)
        for length in (2 << 30, 0):
            try:
                malloc(length)
            except Failed as failed:
                print("failed", failed, flush=True)
        free(short); free(long); free(None)
        print(used(), flush=True)
        try:
            free(4096)
        except Failed as failed:
            print("failed", failed, flush=True)
        try:
            open_handle(b"FcTK" + bytes([1, 0, 46, 0]) + bytes(56))
        except Failed as failed:
            print("failed", failed, flush=True)
        """
    )
    heard = [program.hear() for _ in range(6)]
    assert heard == ["[False, True]", "failed 2", "failed 1", "0", "failed 1", "failed 1"]
    everything = start("print(export(malloc(100))[:4], flush=True)", FABRICAST_HOOK_MIN_BYTES="1")
    assert everything.hear() == "b'FcTK'"


def test_devices_reach_each_other(start):
    owner = start(
        """
        set_device(1)
        address = malloc(4 * MEBI)
        fill(address, 4 * MEBI, 5)
        print(export(address).hex(), flush=True)
        input()
        """
    )
    assert start(RECEIVER).ask(owner.hear()) == "5"


def test_blocks_of_streams_are_used_again(start):
    program = start(
        """
        first = malloc(4 * MEBI, 8)
        free(first, 8)
        again = malloc(4 * MEBI, 8)
        free(again)
        other = malloc(4 * MEBI)
        free(other, 8)
        print(first == again, used() <= 64 * MEBI, flush=True)
        """
    )
    assert program.hear() == "True True"


def test_threads_and_children(start):
    program = start(
        """
        def work():
            for number in range(100):
                address = malloc(2 * MEBI)
                fill(address, 2 * MEBI, number)
                assert memory(address, 2 * MEBI)[5] == number
                free(address)
        workers = [threading.Thread(target=work) for _ in range(8)]
        for worker in workers: worker.start()
        for worker in workers: worker.join()
        print(used(), flush=True)
        child = os.fork()
        if child == 0:
            try:
                malloc(2 * MEBI)
            finally:
                os._exit(0)
        print(os.waitpid(child, 0)[1], os.system("true"), flush=True)
        """
    )
    assert program.hear() == "0" and program.hear() == "0 0"


def test_programs_without_cuda_are_left_alone(tmp_path):
    environment = dict(os.environ, LD_PRELOAD=os.environ["HOOK"], FABRICAST_DIRECTORY=str(tmp_path))
    body = "import os; print(len(os.listdir('/proc/self/task')), os.getrandom(4) != b'')"
    done = subprocess.run([sys.executable, "-c", body], env=environment, capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.stderr) == ("1 True\n", "") and not list(tmp_path.iterdir())


def test_system_calls_are_passed_on(start):
    program = start(
        """
        print(cuda.syscall(ctypes.c_long(SYS_GETTID)) == threading.get_native_id(), flush=True)
        print(cuda.syscall(ctypes.c_long(99999)), ctypes.get_errno() == 38, flush=True)
        try:
            get_descriptor(os.getpid(), 9999)
        except OSError as error:
            print(error.errno, flush=True)
        """
    )
    assert [program.hear() for _ in range(3)] == ["True", "-1 True", "9"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start processes as another user")
@pytest.mark.parametrize("preload", [True, False])
def test_descriptors_without_the_right_to_trace(start, tmp_path, preload):
    """PyTorch's expandable segments: process id, and number of a descriptor of the driver."""
    tmp_path.chmod(0o700)
    os.chown(tmp_path, NOBODY, NOBODY)
    for above in tmp_path.parents[:2]:
        above.chmod(0o711)
    variables = {"user": NOBODY, "preload": preload, "FABRICAST_HOOK_DESCRIPTORS": "/memfd:fake-cuda"}
    owner = start(
        """
        import resource
        # Others may not trace it.
        assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0
        cuda.cudaIpcGetEventHandle(ctypes.byref(Handle()), None)
        exported = os.memfd_create("fake-cuda-mapped-0")
        os.write(exported, b"a piece")
        print(os.getpid(), exported, flush=True)
        input()
        """,
        **variables,
    )
    process, number = owner.hear().split()
    receiver = start(
        f"""
        for number in ({number}, 0):
            try:
                print(os.pread(get_descriptor({process}, number), 100, 0), flush=True)
            except OSError as error:
                print(error.errno, flush=True)
        """,
        **variables,
    )
    assert [receiver.hear(), receiver.hear()] == (["b'a piece'", "1"] if preload else ["1", "1"])
