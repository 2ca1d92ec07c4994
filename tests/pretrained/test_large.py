"""A folder is read weight by weight: the peak of memory is the result."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import pretrained
from attnlab.heads import Standard
from attnlab.models import FFN

CHILD = """
import sys
import jax
from attnlab import pretrained

def kib(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

folder, dtype = sys.argv[1:]
pretrained.param_shapes(pretrained.load_config(folder))  # JAX itself is not what is measured
jax.device_put(jax.numpy.ones(3)).block_until_ready()
before = kib("VmRSS")
_, params = pretrained.load(folder, param_dtype=dtype)
jax.block_until_ready(params)
size = sum(a.nbytes for a in jax.tree.leaves(params))
print((kib("VmHWM") - before) * 1024 / size, size)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_peak_is_the_result(stored, tmp_path):
    """At most 1.2 times it, also where the file is twice as wide, or half."""
    config = pretrained.published_config(
        "llama_3_2_1b", vocab_size=20000, width=512, num_layers=8,
        heads=Standard(num_heads=8, num_kv_heads=8, head_dim=64),
        ffn=FFN(width=2048, activation="gated_silu", bias=False),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    draw = lambda a: rng.random(a.shape, np.float32).astype(jnp.dtype(stored))
    params = jax.tree.map(draw, pretrained.param_shapes(config))
    pretrained.save(tmp_path, config.build(), params)
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, "-c", CHILD, str(tmp_path), dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        ratio, size = map(float, done.stdout.split())
        assert size > 7e7
        assert ratio < 1.2, (stored, dtype)
