"""The memory that a step needs on each device, checked before the first step runs."""

import os
from typing import NamedTuple

import jax


class StepMemory(NamedTuple):
    """Bytes on one device."""

    arguments: int
    """Parameters, optimizer state and batch, of all seeds."""
    peak: int
    """The most that a step holds at once, with the arguments."""


def step_memory(compiled: jax.stages.Compiled) -> StepMemory | None:
    """What XLA planned for a compiled step; None where a platform does not report it."""
    plan = compiled.memory_analysis()
    if plan is None:
        return None
    outputs: int = plan.output_size_in_bytes - plan.alias_size_in_bytes
    arguments: int = plan.argument_size_in_bytes
    return StepMemory(arguments, arguments + outputs + plan.temp_size_in_bytes)


def device_memory(device: jax.Device) -> int | None:
    """Bytes that a device has, used or not; the devices of a CPU share its memory evenly."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform == "cpu" and hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return memory // jax.local_device_count("cpu")
    return None


def check_fits(needed: StepMemory, available: int | None) -> str:
    """A line that says how much is needed. Raises ValueError where a device has less."""
    report = (
        f"each device needs {format_bytes(needed.peak)} for a step, "
        f"{format_bytes(needed.arguments)} of it weights, optimizer and batch"
    )
    if available is None:
        return report
    if needed.peak > available:
        raise ValueError(
            f"{report}, and has {format_bytes(available)}: raise train.accumulate or lower "
            "train.batch_size, set model.compute.remat, train fewer seeds at once, or shard the "
            "weights with --model_parallel and --shard_state"
        )
    return f"{report}; it has {format_bytes(available)}"


def format_bytes(size: float) -> str:
    """
    >>> format_bytes(1000), format_bytes(123_456_789), format_bytes(7.5e10)
    ('0.001 MB', '123 MB', '75 GB')
    """
    unit, divisor = ("GB", 1e9) if size >= 1e9 else ("MB", 1e6)
    value = size / divisor
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
