"""What a device can do at most: its dense products a second, as its maker prints them.

float32 stands for what JAX does with float32 arrays unless it is told otherwise: TF32 on NVIDIA
GPUs. Sparsity, which doubles the numbers in print, is left out.
"""

from typing import NamedTuple


class Peak(NamedTuple):
    """FLOP/s by dtype; one that is not there is not known."""

    flops: dict[str, float]
    source: str


HOPPER = {"bfloat16": 989.4e12, "float32": 494.7e12}
GPU, TPU = "NVIDIA's data sheet of {}", "Google Cloud's page of the {}"
PEAKS: dict[str, Peak] = {
    "NVIDIA H100 80GB HBM3": Peak(HOPPER, GPU.format("the H100 SXM")),
    "NVIDIA H100 PCIe": Peak({"bfloat16": 756e12, "float32": 378e12}, GPU.format("the H100 PCIe")),
    "NVIDIA H200": Peak(HOPPER, GPU.format("the H200 SXM")),
    "NVIDIA A100-SXM4-40GB": Peak({"bfloat16": 312e12, "float32": 156e12}, GPU.format("the A100")),
    "NVIDIA A100-SXM4-80GB": Peak({"bfloat16": 312e12, "float32": 156e12}, GPU.format("the A100")),
    "TPU v4": Peak({"bfloat16": 275e12}, TPU.format("v4")),
    "TPU v5 lite": Peak({"bfloat16": 197e12}, TPU.format("v5e")),
    "TPU v5": Peak({"bfloat16": 459e12}, TPU.format("v5p")),
    "TPU v6 lite": Peak({"bfloat16": 918e12}, TPU.format("v6e")),
}
"""`device_kind` as JAX tells it -> its peak."""


def fraction_of_peak(flops: float, seconds: float, kind: str, dtype: str) -> float | None:
    """The share of what one device can do that work of so many FLOPs took; None: not known.

    >>> fraction_of_peak(989.4e12, 4.0, "NVIDIA H200", "bfloat16")
    0.25
    """
    peak = PEAKS[kind].flops.get(dtype) if kind in PEAKS else None
    return flops / seconds / peak if peak else None
