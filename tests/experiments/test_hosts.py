"""A run on two hosts is the run on one."""

import json
import socket
import subprocess
import sys

import numpy as np
import pytest
from commands import command, user_environment
from conftest import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "cut"), [(2, []), (4, ["--model_parallel=4", "--shard_state"])]
)
def test_two_hosts_are_one_host(tmp_path, nine_letters, devices, cut):
    """Two processes of two devices each, as on two hosts, give the losses of one process; so do two
    of four that cut each model in four and share the state out, and one process can go on."""
    folder = tmp_path / "two"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "experiments.run", *words_of(nine_letters, folder), *cut]
    words += ["--distributed", f"--coordinator_address=localhost:{port}", "--num_processes=2"]
    words += [f"--jax_num_cpu_devices={devices}"]
    environment = user_environment() | {"PYTHONPATH": str(ROOT)}
    hosts = [
        subprocess.Popen([*words, f"--process_id={i}"], cwd=ROOT, env=environment) for i in range(2)
    ]
    assert [host.wait(timeout=600) for host in hosts] == [0, 0]
    got = heldout(folder)
    np.testing.assert_allclose(got, run(tmp_path / "one", nine_letters), rtol=1e-5)
    for path in folder.glob("runs/*/result.json"):
        path.unlink()  # as if the hosts had been killed behind the last step
    np.testing.assert_allclose(got, run(folder, nine_letters), rtol=1e-5)


def words_of(text, folder):
    config = "--config=experiments/configs/byte_lm.py:tiny"
    return [config, f"--config.data.path={text}", f"--workdir={folder}"]


def run(folder, text):
    done = command("experiments.run", *words_of(text, folder))
    assert done.returncode == 0, done.stderr
    return heldout(folder)


def heldout(folder):
    results = [json.loads(p.read_text()) for p in sorted(folder.glob("runs/*/result.json"))]
    return [result["scores"]["heldout"]["bits_per_byte"] for result in results]
