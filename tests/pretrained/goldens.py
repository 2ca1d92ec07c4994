"""Published models in small: a config, tensors, inputs and what the peer gave for them."""

import json

import numpy as np
from conftest import ROOT

from attnlab import pretrained
from attnlab.pretrained.tensors import write_file

GOLDEN = sorted((ROOT / "tests" / "pretrained" / "golden").glob("*.npz"))
# The plainest of each family.
FAMILIES = {
    name: ROOT / "tests" / "pretrained" / "golden" / f"{name}.npz" for name in pretrained.FAMILIES
}


def split(path):
    """(config.json, tensors, inputs, outputs) of a golden file."""
    found = {"tensor": {}, "input": {}, "output": {}}
    with np.load(path, allow_pickle=False) as file:
        config = json.loads(file["config"].tobytes())
        for key in file.files:
            if key != "config":
                kind, name = key.split(" ", 1)
                found[kind][name] = file[key]
    given = {name: a.astype(np.int32) for name, a in found["input"].items()}
    return config, found["tensor"], given, found["output"]


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_file(folder / "model.safetensors", tensors)
    return folder


def close(got, expected):
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-4, atol=1e-4)
