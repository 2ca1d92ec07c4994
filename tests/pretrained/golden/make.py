"""Makes the golden files: weights, inputs and outputs of every peer of `parity`, very small.

    pip install -e ".[test,parity]" && python tests/pretrained/golden/make.py

Names behind it make these alone. With them `test_pretrained.py` holds parity where neither torch
nor transformers is.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from attnlab.nested import JSON
from attnlab.pretrained import FAMILIES

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "parity")]

import peers  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

VOCAB = 23
# The attribute of each family -> its value here.
SIZES = {
    **dict.fromkeys(("hidden_size", "dim", "n_embd", "d_model"), 12),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "n_inner", "d_ff", "ffn_dim"), 10),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 10),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 17),
    "vocab_size": VOCAB,
    "embedding_size": 6,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 8),
}
# Beside the plainest model of each family; all of `parity` would take the files over 6 MB.
MORE = """
albert-groups-inner bert-bare-3-heads-big-eps bert-classes bert-untied-gelu_new
deepseek_v3-experts distilbert-bare-sinusoids gpt2-bare-inner-relu gpt2-unscaled-untied
llama-classes llama-llama3-biases-tied roberta-bare-pad-4 t5-1.1-own-readout t5-encoder
""".split()  # noqa: SIM905


def main() -> None:
    for name in sys.argv[1:] or (*FAMILIES, *MORE):
        attributes = peers.PEERS[name][2]
        sizes = {key: value for key, value in SIZES.items() if key in attributes}
        if {"num_key_value_heads", "rotary_pct", "local_attention"} & set(attributes):
            sizes["hidden_size"] = 16  # rotary positions turn pairs
        if name in ("falcon", "gptj"):
            sizes["n_embd" if name == "gptj" else "hidden_size"] = 16
        if "num_experts_per_tok" in attributes:
            sizes["intermediate_size"] = 8  # grouped products of torch need a multiple of 4
        model = peers.make(name, **sizes)
        given = peers.inputs(name, length=8 + name.count("-"), vocab=VOCAB)
        expected = peers.outputs(model, given)
        small = {key: a.astype(np.int8) for key, a in given.items()}
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            config = json.loads((Path(folder) / "config.json").read_text())
            tensors = load_file(Path(folder) / "model.safetensors")
        store(HERE / f"{name}.npz", config, tensors, small, expected)
    for name in peers.TORCH if not sys.argv[1:] else ():
        store(HERE / "torch" / f"{name}.npz", *peers.torch_case(name))


def store(path: Path, config: JSON, *parts: dict[str, np.ndarray]) -> None:
    """The inverse of `goldens.split`."""
    found = {"config": np.frombuffer(json.dumps(config).encode(), np.uint8)}
    for kind, arrays in zip(("tensor", "input", "output"), parts, strict=True):
        found |= {f"{kind} {name}": a for name, a in arrays.items()}
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, **found)
    print(path.stem, path.stat().st_size)


if __name__ == "__main__":
    main()
