"""Models by their name on the Hugging Face Hub, here a server on the loopback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hub_server
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from goldens import SMALL

from attnlab import pretrained

huggingface_hub = pytest.importorskip("huggingface_hub")

LOAD = """
import json, sys
import numpy as np, jax
from attnlab import pretrained
results = []
for name, options in json.loads(sys.argv[1]):
    try:
        model, params = pretrained.load(name, **options)
        results.append(float(sum(np.abs(a).sum() for a in jax.tree.leaves(params))))
    except Exception as error:
        results.append([type(error).__name__, str(error)])
print(json.dumps(results))
"""


NO_NETWORK = ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"})


def load_all(cases, **environment):
    """What `pretrained.load` gives in a fresh process: the sum of |weights|, or the error."""
    words = [sys.executable, "-c", LOAD, json.dumps(cases)]
    environment = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"} | environment
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """(address, folders of its models, sum of |weights| of the good one)."""
    root = tmp_path_factory.mktemp("hub")
    model = SMALL.build()
    params = model.init(jax.random.key(0), jnp.ones((1, 2), int))["params"]
    pretrained.save(root / "good", model, params)
    (root / "good" / "modeling.py").write_text("raise SystemExit('code was run')")
    (root / "pickled").mkdir()
    shutil.copy(root / "good" / "config.json", root / "pickled")
    (root / "pickled" / "pytorch_model.bin").write_bytes(b"PK")
    models = {"org/good": root / "good", "org/pickled": root / "pickled", "oldest": root / "good"}
    address = hub_server.serve(models | {"org/gated": 403})
    return address, root, float(sum(np.abs(a).sum() for a in jax.tree.leaves(params)))


def test_models_by_name(hub, tmp_path):
    """By "org/name", by the bare name of old models, and at a commit; then without a network."""
    address, root, total = hub
    commit = {"revision": hub_server.COMMIT}
    cases = [["org/good", {}], ["oldest", {}], ["org/good", commit], [str(root / "good"), {}]]
    home = str(tmp_path / "home")
    assert load_all(cases, HF_ENDPOINT=address, HF_HOME=home) == [total] * 4
    cached = Path(home).rglob("snapshots/*/*")
    assert {path.name for path in cached} == {"config.json", "model.safetensors"}
    for nowhere in NO_NETWORK:
        assert load_all([["org/good", {}]], HF_HOME=home, **nowhere) == [total]


def test_what_the_hub_does_not_have(hub, tmp_path):
    address, root, _ = hub
    cases = [
        ("org/good", {"revision": "nope"}, "'nope'"),
        ("org/none", {}, "no folder 'org/none'"),
        ("org/gated", {}, "HF_TOKEN"),
        ("org/pickled", {}, "a pickle can run code"),
        ("./nowhere/at/all", {}, "no folder"),
        (str(root / "good"), {"revision": "main"}, "revision"),
    ]
    asked = [case[:2] for case in cases]
    found = load_all(asked, HF_ENDPOINT=address, HF_HOME=str(tmp_path / "home"))
    for (*case, text), (kind, message) in zip(cases, found, strict=True):
        assert (kind, "\n" in message, text in message) == ("ValueError", False, True), case
    for nowhere in NO_NETWORK:
        [(kind, message)] = load_all([["org/good", {}]], HF_HOME=str(tmp_path / "new"), **nowhere)
        assert (kind, "\n" in message) == ("ConnectionError", False)
        assert "no folder 'org/good'" in message


def test_a_download_that_breaks_off(monkeypatch):
    """The HTTP client of the library raises an error of its own."""

    def fetch(*args, **options):
        raise huggingface_hub.errors.HTTPError("peer closed the connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(ConnectionError, match=r"'org/good' could not be .*peer closed the conn"):
        pretrained.load("org/good")
