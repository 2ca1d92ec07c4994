"""Torch set up as JAX is: the same cores, the same device, arrays to tensors and back."""

import functools
from typing import Any

import jax
import numpy as np

from attnlab.lab.machine import cores


@functools.cache
def load() -> Any:
    """The module. Raises ImportError where torch is missing."""
    import torch

    torch.set_num_threads(len(cores()))
    torch.backends.cuda.matmul.allow_tf32 = True  # as JAX does
    return torch


def device() -> str:
    """The one that JAX uses."""
    return "cuda" if jax.default_backend() == "gpu" else "cpu"


def tensor(a: Any) -> Any:
    """A copy on the device in the array's dtype; NumPy has no bfloat16, so float32 carries it."""
    torch = load()
    if a.dtype == jax.numpy.bfloat16:
        return torch.tensor(np.asarray(a, np.float32), device=device(), dtype=torch.bfloat16)
    return torch.tensor(np.asarray(a), device=device())


def trained(a: Any) -> Any:
    """A tensor that gets a gradient."""
    return tensor(a).requires_grad_()


def array(t: Any) -> np.ndarray:
    """A tensor as a NumPy array, bfloat16 as float32."""
    torch = load()
    t = t.detach().cpu()
    return (t.float() if t.dtype == torch.bfloat16 else t).numpy()


def wait() -> None:
    """Until the device has done all it was asked."""
    if device() == "cuda":
        load().cuda.synchronize()
