"""A run on two hosts is the run on one."""

import json
import subprocess
import sys

import numpy as np
import pytest
from commands import command
from conftest import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "cut"), [(2, {}), (4, {"model_parallel": 4, "shard_state": True})]
)
def test_two_hosts_are_one_host(tmp_path, nine_letters, devices, cut):
    """Two processes of two devices each, as on two hosts, give the losses of one process; so do two
    of four that cut each model in four and share the state out, and one process can go on."""
    code = (
        f"import sys, jax; jax.config.update('jax_num_cpu_devices', {devices});"
        "jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]));"
        "from experiments.setup import run_config; from experiments.configs import byte_lm;"
        "from attnlab import lab;"
        "from pathlib import Path; config = byte_lm.get_config('tiny');"
        "config.data.path = sys.argv[3];"
        f"run_config(config, Path(sys.argv[4]), lab.RunOptions(**{cut}))"
    )
    folder = tmp_path / "two"
    start = [sys.executable, "-c", code, f"localhost:{12355 + devices}"]
    words = (str(nine_letters), str(folder))
    hosts = [subprocess.Popen([*start, str(i), *words], cwd=ROOT) for i in range(2)]
    assert [host.wait(timeout=300) for host in hosts] == [0, 0]
    got = heldout(folder)
    np.testing.assert_allclose(got, run(tmp_path / "one", nine_letters), rtol=1e-5)
    for path in folder.glob("runs/*/result.json"):
        path.unlink()  # as if the hosts had been killed behind the last step
    np.testing.assert_allclose(got, run(folder, nine_letters), rtol=1e-5)


def run(folder, text):
    config = "--config=experiments/configs/byte_lm.py:tiny"
    done = command("experiments.run", config, f"--config.data.path={text}", f"--workdir={folder}")
    assert done.returncode == 0, done.stderr
    return heldout(folder)


def heldout(folder):
    results = [json.loads(p.read_text()) for p in sorted(folder.glob("runs/*/result.json"))]
    return [result["scores"]["heldout"]["bits_per_byte"] for result in results]
