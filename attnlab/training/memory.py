"""What a step needs on each device, told and checked before the first one runs."""

import os
from typing import Any, NamedTuple

import jax


class Need(NamedTuple):
    """Bytes on one device."""

    arguments: int
    """Weights, what the optimizer keeps, and the batch, of all seeds."""
    peak: int
    """The most that a step holds at once, the arguments included."""


def need(compiled: Any) -> Need | None:
    """Of a compiled step, as XLA planned it; None where a platform does not tell."""
    plan = compiled.memory_analysis()
    if plan is None:
        return None
    made = plan.output_size_in_bytes - plan.alias_size_in_bytes
    given = plan.argument_size_in_bytes
    return Need(given, given + made + plan.temp_size_in_bytes)


def there(device: Any) -> int | None:
    """Bytes that a device has, used or not; the devices of a CPU share its memory evenly."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    if device.platform == "cpu" and hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return memory // jax.local_device_count("cpu")
    return None


def check(needed: Need, has: int | None) -> str:
    """A line that says how much is needed. Raises ValueError where a device has less."""
    told = (
        f"each device needs {amount(needed.peak)} for a step, "
        f"{amount(needed.arguments)} of it weights, optimizer and batch"
    )
    if has is None:
        return told
    if needed.peak > has:
        raise ValueError(
            f"{told}, and has {amount(has)}: raise train.accumulate or lower train.batch_size, set "
            "model.remat, train fewer seeds at once, or cut the weights with --model_parallel and "
            "--cut_state"
        )
    return f"{told}; it has {amount(has)}"


def amount(size: float) -> str:
    """
    >>> amount(1000), amount(123_456_789), amount(7.5e10)
    ('0.001 MB', '123 MB', '75 GB')
    """
    unit, divisor = ("GB", 1e9) if size >= 1e9 else ("MB", 1e6)
    value = size / divisor
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
