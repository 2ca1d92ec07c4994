"""What a sweep says before it begins and when it ends."""

from typing import Any

import pytest
from written_arms import undrawn, write_arm, write_sweep

from attnlab import flops_per_token, num_parameters
from experiments import sweep
from experiments.configs import byte_lm
from experiments.reporting import results, terminal
from experiments.running import arm, launch
from experiments.running.jobs import Room

__all__ = ["undrawn"]


def test_the_header_says_what_every_arm_costs():
    config = launch.load("experiments/configs/byte_lm.py:tiny,wide")[1]
    one = arm.resolve(config)
    lines = terminal.header({"a": one, "bc": one}, "runs/x", Room(5, 1, [0], [])).splitlines()
    tokens = 2 * 20 * 8 * 16  # seeds, steps, rows, length
    flops = 3 * tokens * flops_per_token(one.model, 16)
    assert lines[0] == (
        f"2 arms in runs/x, 2 at once, 1 thread each; {2 * flops:.2e} FLOPs in all, less what is "
        "complete"
    )
    assert lines[1].split() == [
        "arm",
        "parameters",
        "seeds",
        "steps",
        "tokens",
        "training",
        "FLOPs",
    ]
    parameters = f"{num_parameters(one.model):,}"
    assert lines[3].split() == ["bc", parameters, "2", "20", f"{tokens:,}", f"{flops:.2e}"]


def test_the_longest_arm_begins_first():
    """By FLOPs of all its seeds; arms that cost the same keep their order."""
    base = byte_lm.get_config("tiny")
    changes: dict[str, dict[str, Any]] = {
        "narrow": {"model.heads.layout": "narrow"},
        "standard": {},
        "wide": {"model.heads.layout": "wide"},
        "standard, six seeds": {"train.seeds": tuple(range(6))},
        "standard, shared": {"model.sharing": "albert"},
    }
    configs = {name: sweep.with_changes(base, some) for name, some in changes.items()}
    assert list(sweep.longest_first(configs)) == [
        "standard, six seeds", "wide", "standard", "standard, shared", "narrow"
    ]  # fmt: skip


@pytest.mark.usefixtures("undrawn")
def test_the_end_ranks_the_arms_and_says_how_sure_it_is(tmp_path):
    write_sweep(tmp_path)
    write_arm(tmp_path / "lost", "narrow", "separate", 3.0, 90_000, diverged=True)
    told = terminal.ranking(results.read([tmp_path]))
    table, _, answer = told.partition("\n\n")
    rows = [line.split("  ")[0] for line in table.splitlines()]
    assert rows[0] == "arm"
    assert rows[1] == "wide · separate"
    assert rows[-1] == "narrow · separate"
    assert "diverged" in table.splitlines()[-1]
    answer = " ".join(answer.split())
    assert answer.startswith("At equal width, wide · separate predicts best: 2.80")
    assert "*" not in told
