"""A CUDA device made of host memory, for tests on machines without a GPU.

It adds a device guard, an allocator, hooks and kernels for device type "cuda" to a CPU build of PyTorch. Forward and
backward then run with values, on the autograd engine's own thread for the device, with streams, events and two devices.
Each kernel is the CPU's, on a CPU tensor over the same memory, so results equal the CPU's bit for bit. Kernels run
synchronously: no stream ever has to wait, but waits are counted.

PyTorch requests CUDA's hooks once, during its import. So a process has to be started for the stand-in:

    pytest --device cuda-stand-in tests/cuda           # tests of tests/cuda/; with --device cuda: on a GPU
    PYTHONPATH=tools python -m cuda_stand_in program.py arguments
    PYTHONPATH=tools python -m cuda_stand_in -m module arguments
    PYTHONPATH=tools python -m cuda_stand_in -c "import torch; print(torch.ones(2, device='cuda'))"

or, at the top of a program, before it imports torch, `cuda_stand_in.start()`. Processes that `multiprocessing` spawns
from it have the device too. Programs use the device as they use a GPU: `torch.ones(2, device="cuda:1")`,
`model.cuda()`, `torch.cuda.Stream()`, `torch.cuda.synchronize()`.

Tests use the functions below: `counting`, `kernels`, `live_bytes`, `capturing`. The C++ code is compiled on first use
into build/cuda_stand_in/ (8 seconds), once for each PyTorch and each change of the code.

Ops with kernels only for CUDA (cuDNN's convolutions, fused cells, FlashAttention) are composed of other ops.

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
