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
# The rest, in `tests/pretrained/parity` alone, would take the files over 4 MB.
LEFT_OUT = """
albert-square-map albert-one-call-two-blocks roberta-untied t5-bare-gelu llama-bare-linear
qwen3-sliding-biases gpt_neox-bare gpt_neox-in-turn-tied qwen3-mixed qwen2-bare-all-see-all
vit-bare-square-no-biases gpt2-scores-by-layer t5-scaled-own-readout-big-eps
gemma3_text-untied-linear-biases gemma3_text-bare-all-local deepseek_v3-plain-queries
deepseek_v3-halves deepseek_v3-experts-2-shared mixtral-window-bare qwen2_moe-dense-and-window
qwen3_moe-every-second gpt_oss-all-see-all electra-bare-one-width phi3-window-partial
gemma2-no-caps starcoder2-no-biases cohere-normed-heads phi-normed-heads-tied falcon-grouped
falcon-in-turn stablelm-parallel llama-yarn qwen2-yarn-smooth llama-dynamic olmo3-yarn opt-post
bloom-3-heads dinov2-gated mpnet-bare modernbert-biases-untied modernbert-bare-one-layer
deepseek_v3-yarn bart-bare-3-layers bart-scaled exaone4-rotary smollm3-window gemma3_text-both-ways
phi3-longrope phi3-longrope-short phi-yarn deepseek_v3-yarn-two-scales bert-questions albert-classes
roberta-classes roberta-tokens distilbert-classes electra-classes modernbert-classes modernbert-mean
stablelm-normed-heads gpt_oss-other-act opt-plain-norms vit-relu-pooler t5-tokens
modernbert-tokens llama-tokens llama-questions gpt2-classes gpt2-tokens
""".split()  # noqa: SIM905


def main() -> None:
    for name in sys.argv[1:] or [name for name in peers.PEERS if name not in LEFT_OUT]:
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
