"""Ranks exchange parts of a tensor, each directly into the memory of the next.

    torchrun --nproc-per-node 4 ranks.py [--device emulated:0]
    mpirun -n 4 python ranks.py
"""

import argparse

import fabricast
import numpy
from fabricast.launch import Group

LENGTH = 1 << 18


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="host")
    options = parser.parse_args()
    with Group() as group:
        inbox = fabricast.allocate((group.size, LENGTH), "float32", device=options.device)
        part = fabricast.allocate((LENGTH,), "float32", device=options.device)
        part[...] = group.rank + 1
        agent = group.agent
        source, target = agent.register(part), agent.register(inbox, write=True)
        descriptors = group.all_gather(target.descriptor)
        puts = []
        for rank in range(group.size):
            if rank == group.rank:
                inbox[rank] = part
                continue
            route = agent.join(group.peer(rank), descriptors[rank], source)
            puts.append(agent.put(route, [(group.rank * part.nbytes, 0, part.nbytes)]))
        for put in puts:
            put.wait()
        group.barrier()
        expected = numpy.arange(1, group.size + 1, dtype="float32")
        assert (inbox == expected[:, None]).all()
        if group.rank == 0:
            print(f"all-gather of {group.size} ranks by {group.launcher}: ok")


if __name__ == "__main__":
    main()
