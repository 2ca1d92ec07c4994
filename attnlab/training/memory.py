"""The memory that a step needs on each device, checked before the first step runs."""

import os

import jax


def device_memory(device: jax.Device) -> int | None:
    """Bytes that a device has, used or not; the devices of a CPU share its memory evenly."""
    limit: int | None = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform == "cpu" and hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limit = memory // jax.local_device_count("cpu")
    return limit


def check_memory(step: jax.stages.Compiled, available: int | None) -> str:
    """A line that says how much a compiled step needs on a device; "" where a platform does not
    report it. Raises ValueError where a device has less than that."""
    plan = step.memory_analysis()
    if plan is None:
        return ""
    arguments = plan.argument_size_in_bytes
    outputs = plan.output_size_in_bytes - plan.alias_size_in_bytes
    peak = arguments + outputs + plan.temp_size_in_bytes
    report = (
        f"each device needs {peak / 1e6:,.2f} MB for a step, {arguments / 1e6:,.2f} MB of it "
        "weights, optimizer and batch"
    )
    if available is None:
        return report
    if peak > available:
        raise ValueError(
            f"{report}, and has {available / 1e6:,.2f} MB: raise train.accumulate or lower "
            "train.batch_size, set model.compute.remat, train fewer seeds at once, or shard the "
            "weights (--model_parallel and --shard_state of experiments.run)"
        )
    return f"{report}; it has {available / 1e6:,.2f} MB"
