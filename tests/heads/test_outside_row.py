"""A row from outside the package: what it gives (`outside.py`) is all that it takes.

It is one of the cases of `contract.py`, so all contract tests run over it too.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import command
from conftest import ROOT, assert_close, deep
from outside import OUTSIDE

from attnlab import ModelConfig
from attnlab.heads.old.layouts import Layout
from attnlab.model.accounting import model_cache_bytes, unique_parameters
from attnlab.model.decode import prefill


def test_it_is_maps_a_cache_and_three_functions():
    given = {f for f in Layout._fields if getattr(OUTSIDE, f) != Layout._field_defaults.get(f)}
    assert given == {"maps", "cache", "query", "store", "merge"}


@pytest.mark.usefixtures("outside_row")
@pytest.mark.parametrize("plan", deep(["separate", "cla:2", "relaxed:2"], "cla:2"))
def test_a_model_is_made_of_it(plan, x64):
    """Parameters and cache as counted, decoding = whole, keys shared between layers."""
    config = ModelConfig(
        layout="outside", num_heads=6, num_kv_heads=2, head_dim=4, shared_dim=8, plan=plan,
        vocab_size=19, max_len=9, width=12, num_layers=4, ffn_width=16, positions="rotary",
        dtype="float64",
    )  # fmt: skip
    model, tokens = config.build(), jnp.array([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
    params = model.init(jax.random.key(0), tokens)["params"]
    params = jax.tree.map(lambda a: 2 * a.astype(jnp.float64), params)
    assert unique_parameters(config) == sum(a.size for a in jax.tree.leaves(params))
    cache = config.empty_cache(1, 1)
    stored = sum(a.size for n, a in cache.items() if n != "length")
    assert 4 * stored == model_cache_bytes(config)

    @jax.jit
    def both(params, tokens):
        seen, cache = prefill(model, params, tokens[:, :4], config.empty_cache(2, 7))
        rest, _ = prefill(model, params, tokens[:, 4:], cache)
        whole = functools.partial(model.apply, {"params": params})(tokens)
        return jnp.concatenate([seen, rest], axis=1), whole

    assert_close(*both(params, tokens))


def test_it_trains_by_flag(tmp_path):
    """A config file that imports the row, and the command that runs any other."""
    config = tmp_path / "mine.py"
    config.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests' / 'heads')!r})\n"
        "import outside\noutside.register()\n"
        "from experiments.configs.byte_lm import get_config\n"
    )
    done = command(
        "experiments.run",
        f"--config={config}:outside,tiny",
        "--config.model.shared_dim=8",
        "--config.model.num_kv_heads=1",
        f"--workdir={tmp_path / 'run'}",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["layout"] == "outside"
    assert result["status"] == "complete"
    assert np.isfinite(result["heldout_bits_per_byte"]).all()
