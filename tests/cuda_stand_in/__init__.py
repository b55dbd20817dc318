"""A CUDA device made of host memory, for tests on machines without a GPU.

A CPU build of PyTorch is given a device guard, an allocator, hooks and kernels for device type "cuda". Forward and
backward then run for real: with values, on the autograd engine's own thread for the device, with streams, events and
two devices. Each kernel is the CPU's, on a CPU tensor over the same memory, so results are the CPU's bit for bit.
Work is done at once: a stream never has to be waited for, but who waits is counted.

PyTorch asks for CUDA's hooks once, while it is imported. So a process has to be started for the stand-in:

    pytest --device cuda-stand-in tests/cuda           # tests of tests/cuda/; with --device cuda: on a GPU
    PYTHONPATH=tests python -m cuda_stand_in program.py arguments
    PYTHONPATH=tests python -m cuda_stand_in -m module arguments
    PYTHONPATH=tests python -m cuda_stand_in -c "import torch; print(torch.ones(2, device='cuda'))"

or, at the top of a program, before it imports torch, `cuda_stand_in.start()`. Processes that `multiprocessing` spawns
from it have the device too. Programs use the device as they use a GPU: `torch.ones(2, device="cuda:1")`,
`model.cuda()`, `torch.cuda.Stream()`, `torch.cuda.synchronize()`.

What tests measure and set is below: `counting`, `kernels`, `live_bytes`, `capturing`. The C++ code is compiled when it
is first needed, into build/cuda_stand_in/ (8 seconds), once for each PyTorch and each change of the code.

What CUDA alone has kernels for (cuDNN's convolutions, fused cells, FlashAttention) is put together from other ops.

Limits: dense tensors only, no torch.compile for the device, no cuDNN RNNs, no builds of PyTorch with CUDA (`why_not`);
and not every op refuses a CPU tensor among the device's.
"""

from cuda_stand_in.build import why_not
from cuda_stand_in.device import (
    Cast,
    Counts,
    capturing,
    counting,
    kernels,
    live_bytes,
    peak_bytes,
    reset,
    running,
    start,
)

__all__ = [
    "Cast",
    "Counts",
    "capturing",
    "counting",
    "kernels",
    "live_bytes",
    "peak_bytes",
    "reset",
    "running",
    "start",
    "why_not",
]
