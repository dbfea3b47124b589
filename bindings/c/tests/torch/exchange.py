"""exchange.py PROGRAM [cuda]: exchanges tensors with exchange.cpp, in both directions."""

import os
import socket
import subprocess
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore", message=".*NumPy.*")
import torch  # noqa: E402

import fabricast.torch  # noqa: E402

TYPES = [
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128", "bool",
    "bfloat16", "uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu",
]
VIEWS = [
    lambda it: it,
    lambda it: it[1:3],
    lambda it: it[:, 1:7:2],
    lambda it: it.T,
    lambda it: it[:1].expand(3, 8),
    lambda it: it[2, 3],
    lambda it: it[:0],
    lambda it: it[:, 8:],
]


def is_same(one, other):
    """Compares bytes, since some types have no comparison."""
    if one.dtype != other.dtype or one.shape != other.shape or one.device.type != other.device.type:
        return False
    if one.is_complex():
        return torch.equal(torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj()))
    one, other = (it.detach().resolve_neg().contiguous().view(-1) for it in (one, other))
    return one.numel() == 0 or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def main(program, device):
    here, there = socket.socketpair()
    arguments = [program, str(there.fileno())] + (["cuda"] if device == "cuda" else [])
    child = subprocess.Popen(arguments, pass_fds=[there.fileno()])
    there.close()

    def back(command, tensor):
        here.sendall(command)
        fabricast.torch.send(tensor, here)
        received = fabricast.torch.recv(here)
        assert is_same(received, tensor), (command, tensor, received)
        assert received.requires_grad == tensor.requires_grad, (command, tensor)
        return received

    whole = torch.arange(32, dtype=torch.float32, device=device).reshape(4, 8)
    if device == "cpu":
        here.sendall(b"s")
    for command in (b"e", b"m"):
        for name in TYPES:
            if not hasattr(torch, name):
                print(f"exchange: this PyTorch has no {name}")
                continue
            source = torch.arange(24, dtype=torch.uint8, device=device).view(-1)
            source = source % 2 == 0 if name == "bool" else source.repeat(16)
            dtype = getattr(torch, name)
            back(command, source if name == "bool" else source.view(dtype)[:24].reshape(4, 6))
        for view in VIEWS:
            back(command, view(whole))
    for view in VIEWS:
        own = fabricast.torch.empty(4, 8, device="host" if device == "cpu" else "cuda:0")
        own.copy_(whole)
        back(b"e", view(own))
    # Gradients, parameters, and views that compute their values.
    assert back(b"e", torch.ones(3, device=device, requires_grad=True)).is_leaf
    back(b"e", torch.nn.Parameter(torch.ones(2, device=device)))
    back(b"e", torch.nn.Parameter(torch.ones(2, device=device), requires_grad=False))
    numbers = torch.tensor([1 + 2j, 3 - 4j], device=device)
    conjugated = back(b"e", numbers.conj())
    assert device == "cuda" or conjugated.is_conj()
    negated = numbers.conj().imag
    assert negated.is_neg()
    assert torch.equal(back(b"e", negated).resolve_neg(), negated.resolve_neg())
    # In the same memory.
    own = fabricast.torch.empty(6, device="host" if device == "cpu" else "cuda:0")
    own.fill_(2)
    here.sendall(b"w")
    fabricast.torch.send(own[1:4], here)
    assert here.recv(1) == b"w"
    assert own.tolist() == [2, 6, 6, 6, 2, 2]
    here.sendall(b"k")
    received = fabricast.torch.recv(here)
    received.fill_(5)
    if device == "cuda":
        torch.cuda.synchronize()
    here.sendall(b".")
    here.sendall(b"v")
    for _ in range(2):
        for view in VIEWS:
            received = fabricast.torch.recv(here)
            assert is_same(received, view(whole)), (received, view(whole))
    del received, own
    here.sendall(b"q")
    assert child.wait(60) == 0, child.returncode


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        os.environ["FABRICAST_DIRECTORY"] = directory
        main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cpu")
