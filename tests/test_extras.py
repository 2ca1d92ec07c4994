"""Who wants the functions alone installs jax, flax, numpy and jaxtyping, and needs nothing else;
heavy packages load on first use."""

import ast
import os
import re
import subprocess
import sys
import tomllib

from conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Of the extras, what Flax brings with it anyway.
OF_FLAX = {"optax", "orbax-checkpoint", "scipy", "absl-py"}
MODULES = {"absl-py": "absl"}


def packages(requirements):
    return {re.split(r"[\[<>=]", line)[0] for line in requirements}


def printed(code):
    """The lines that a new process prints."""
    env = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def without_extras(pieces):
    """What each piece of code prints last where no package of an extra can be imported."""
    missing = set().union(*(packages(lines) for lines in PROJECT["optional-dependencies"].values()))
    missing -= OF_FLAX | {"jax", "attnlab"}
    names = sorted(MODULES.get(name, name.replace("-", "_")) for name in missing)
    code = f"import sys; sys.modules.update(dict.fromkeys({names}))\n"
    code += f"for piece in {pieces}:\n  try: exec(piece)\n  except Exception as e: print(repr(e))"
    return printed(code)


def test_the_base_install_is_four_packages():
    assert packages(PROJECT["dependencies"]) == {"jax", "flax", "numpy", "jaxtyping"}
    extras = PROJECT["optional-dependencies"]
    assert set(re.split(r"[\[\],]", extras["all"][0])) >= {"train", "plot", "pretrained"}
    assert "attnlab[all]" in extras["test"]


FUNCTIONS = """
import jax, jax.numpy as jnp
import attnlab, attnlab.pretrained, attnlab.training
from attnlab import ModelConfig, heads, multi_head_attention
layout = heads.Wide(width=6, num_heads=2)
params = heads.init(jax.random.key(0), layout)
y = multi_head_attention(params, jnp.ones((1, 5, 6)), layout)
model, tokens = ModelConfig(width=12, num_layers=1).build(), jnp.ones((1, 2), int)
print(y.shape, model.apply(model.init(jax.random.key(0), tokens), tokens).logits.shape)
"""
NEEDY = {
    "from attnlab import data; data.make_tokenizer('bpe:300', [])": ("tokenizers", "data"),
    "from attnlab.training import loggers; loggers.TensorBoard(None)": ("tensorboardX", "train"),
    "from attnlab.training import loggers; loggers.WandB(None)": ("wandb", "wandb"),
    "from attnlab.pretrained import tensors; tensors.read_file(None)": (
        "safetensors", "pretrained",
    ),
    "import experiments.run": ("ml_collections", "all"),
}  # fmt: skip


def test_functions_need_no_extra_and_what_does_says_which():
    works, *errors = without_extras([FUNCTIONS, *NEEDY])
    assert works == "(1, 5, 6) (1, 2, 256)"
    for said, (package, extra) in zip(errors, NEEDY.values(), strict=True):
        assert said.startswith("ModuleNotFoundError(")
        assert f'{package} is missing or too old: pip install "attnlab[{extra}]"' in said


def test_import_is_light_and_lazy_packages_load_on_first_use():
    heavy = ("orbax", "matplotlib", "tensorboardX", "absl.app", "ml_collections")
    loaded, lazy = printed(
        f"import sys, attnlab; print([m for m in {heavy} if m in sys.modules]); "
        "before = 'attnlab.interpret' in sys.modules; "
        "print(before, attnlab.interpret.head_statistics.__name__, hasattr(attnlab, 'interpreted'))"
    )
    # Flax itself loads orbax where it finds it; nothing of ours does.
    assert set(ast.literal_eval(loaded)) <= {"orbax"}
    assert lazy.split() == ["False", "head_statistics", "False"]


def test_a_worker_imports_no_statistics_and_no_figures(tmp_path):
    """Of a sweep without runs. Checkpoints import orbax, and a report the others."""
    heavy = ("scipy.stats", "scipy.optimize", "matplotlib", "pandas", "orbax", "jinja2")
    (tmp_path / "specs.json").write_text("[]")
    lines = printed(
        "import sys, flax.linen; before = set(sys.modules); import attnlab.lab.__main__ as worker; "
        f"code = worker.main([{str(tmp_path)!r}]); "
        f"print(code, [m for m in {heavy} if m in set(sys.modules) - before])"
    )
    assert lines == ["0 []"]
