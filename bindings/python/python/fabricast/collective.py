"""Collective operations among processes, on arrays in host memory and of CUDA devices.

>>> import tempfile, threading
>>> import numpy
>>> from fabricast.collective import Domain
>>> directory = tempfile.TemporaryDirectory()
>>> def rank(number):
...     with Domain.join(number, 2, directory=directory.name) as domain:
...         mean = domain.all_reduce(numpy.array([number, 1.0]), "mean")
...         if number == 0:
...             print(mean, domain.all_gather(mean).shape)
...         else:
...             domain.all_gather(mean)
>>> other = threading.Thread(target=rank, args=(1,))    # usually each rank is a process
>>> other.start()
>>> rank(0)
[0.5 1. ] (2, 2)
>>> other.join()
>>> directory.cleanup()

`ParamStore` is for programs that carry out the operations themselves.
"""

from fabricast._native import Domain, ParamEntry, Parameters, ParamStore

__all__ = ["Domain", "ParamEntry", "ParamStore", "Parameters"]
