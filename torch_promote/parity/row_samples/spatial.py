"""Sample calls of ops on images, volumes and signals: pooling, resizing, padding, grids and transforms."""

from __future__ import annotations

import torch

from torch_promote.parity.row_samples.make import Call, Make, Sample, call

CL2D = torch.channels_last
CL3D = torch.channels_last_3d


def _signal(make: Make) -> Call:
    return call(make(2, 6))


def _image(make: Make) -> Call:
    return call(make(2, 4, 6))


#: Transforms along the last dimension.
FFT_1D = ("fft_fft", "fft_hfft", "fft_ifft", "fft_ihfft", "fft_irfft", "fft_rfft")
#: Transforms along the last two dimensions, or along all.
FFT_ND = ("fft_fft2", "fft_fftn", "fft_ifft2", "fft_ifftn", "fft_irfft2", "fft_irfftn", "fft_rfft2", "fft_rfftn")

_SPATIAL: dict[str, list[Sample]] = {
    # Pooling.
    "aten::adaptive_avg_pool3d": [lambda m: call(m(1, 2, 4, 4, 4), [2, 2, 2])],
    "aten::adaptive_max_pool3d": [lambda m: call(m(1, 2, 4, 4, 4), [2, 2, 2])],
    "aten::avg_pool3d": [
        lambda m: call(m(1, 2, 4, 4, 4), [2, 2, 2]),
        lambda m: call(m(1, 2, 4, 4, 4, memory_format=CL3D), [2, 2, 2], [1, 1, 1]),
    ],
    "aten::max_pool3d": [lambda m: call(m(1, 2, 4, 4, 4), [2, 2, 2])],
    "aten::fractional_max_pool2d": [lambda m: call(m(1, 2, 6, 6), [2, 2], [3, 3], m(1, 2, 2, low=0.0, grad=False))],
    "aten::fractional_max_pool3d": [
        lambda m: call(m(1, 2, 6, 6, 6), [2, 2, 2], [3, 3, 3], m(1, 2, 3, low=0.0, grad=False))
    ],
    "aten::max_unpool2d": [lambda m: call(m(1, 1, 2, 2), m.constant([[[[0, 3], [8, 15]]]]), [4, 4])],
    "aten::max_unpool3d": [
        lambda m: call(m(1, 1, 1, 2, 2), m.constant([[[[[0, 3], [8, 31]]]]]), [2, 4, 4], [2, 2, 2], [0, 0, 0])
    ],
    # Resizing.
    "aten::upsample_nearest1d": [lambda m: call(m(2, 3, 4), [8])],
    "aten::upsample_nearest2d": [
        lambda m: call(m(2, 3, 4, 4), [8, 6]),
        lambda m: call(m(2, 3, 4, 4, memory_format=CL2D), [8, 8], 2.0, 2.0),
    ],
    "aten::upsample_nearest3d": [lambda m: call(m(1, 2, 3, 3, 3), [6, 6, 6])],
    "aten::_upsample_nearest_exact1d": [lambda m: call(m(2, 3, 4), [8])],
    "aten::_upsample_nearest_exact2d": [lambda m: call(m(2, 3, 4, 4), [8, 6])],
    "aten::_upsample_nearest_exact3d": [lambda m: call(m(1, 2, 3, 3, 3), [6, 6, 6])],
    "aten::upsample_linear1d": [lambda m: call(m(2, 3, 4), [8], False)],
    "aten::upsample_bilinear2d": [
        lambda m: call(m(2, 3, 4, 4), [8, 6], False),
        lambda m: call(m(2, 3, 4, 4, memory_format=CL2D), [8, 6], True),
    ],
    "aten::upsample_bicubic2d": [lambda m: call(m(2, 3, 4, 4), [8, 6], False)],
    "aten::upsample_trilinear3d": [lambda m: call(m(1, 2, 3, 3, 3), [6, 6, 6], False)],
    "aten::_upsample_bilinear2d_aa": [lambda m: call(m(2, 3, 8, 8), [4, 3], False)],
    "aten::_upsample_bicubic2d_aa": [lambda m: call(m(2, 3, 8, 8), [4, 3], False)],
    # Padding.
    "aten::reflection_pad1d": [lambda m: call(m(2, 3, 5), [2, 1])],
    "aten::reflection_pad2d": [lambda m: call(m(2, 3, 5, 5), [2, 1, 1, 0])],
    "aten::replication_pad1d": [lambda m: call(m(2, 3, 5), [2, 1])],
    "aten::replication_pad2d": [lambda m: call(m(2, 3, 5, 5), [2, 1, 1, 0])],
    "aten::replication_pad3d": [lambda m: call(m(1, 2, 3, 3, 3), [1, 1, 1, 0, 0, 1])],
    # Grids.
    "aten::grid_sampler": [
        lambda m: call(m(1, 2, 4, 4), m(1, 3, 3, 2), 0, 0, False),
        lambda m: call(m(1, 2, 3, 3, 3), m(1, 2, 2, 2, 3), 0, 0, True),
    ],
    "aten::grid_sampler_2d": [lambda m: call(m(1, 2, 4, 4), m(1, 3, 3, 2), 0, 0, False)],
    "aten::grid_sampler_3d": [lambda m: call(m(1, 2, 3, 3, 3), m(1, 2, 2, 2, 3), 0, 0, False)],
    "aten::_grid_sampler_2d_cpu_fallback": [lambda m: call(m(1, 2, 4, 4), m(1, 3, 3, 2), 0, 0, False)],
    # Transforms.
    **{f"aten::{op}": [_signal] for op in FFT_1D},
    **{f"aten::{op}": [_image] for op in FFT_ND},
    "aten::stft": [lambda m: call(m(2, 16), 8, window=m(8, low=0.1), return_complex=True)],
    "aten::stft.center": [lambda m: call(m(2, 16), 8, 4, window=m(8, low=0.1), return_complex=True)],
}
