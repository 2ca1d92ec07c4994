"""Text of a padded batch: that of transformers' own `generate`, token for token.

pip install -e ".[test,parity]" && pytest -m parity tests/pretrained/parity
"""

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.parity

from attnlab import pretrained  # noqa: E402
from attnlab.models import generate, limit_logits, prefill  # noqa: E402

NAMES = "gpt2 llama mistral gpt_neox deepseek_v3 qwen2_moe gpt_oss t5".split()  # noqa: SIM905
NAMES.append("t5-scaled-own-readout-big-eps")
REAL = np.arange(9) >= [[0], [2], [5], [8]]
NEW = 12


@pytest.fixture(params=NAMES)
def both(request, tmp_path):
    """(their model, ours, our params, ids, what else ours is told)"""
    import peers  # fails, not skips, without torch and transformers

    theirs = peers.make(request.param)
    theirs.save_pretrained(tmp_path)
    model, params = pretrained.load(tmp_path)
    ids = np.where(REAL, np.random.default_rng(4).integers(5, 97, REAL.shape), 3)
    if model.config.kind == "decoder":
        return theirs, model, params, ids, {"prompt": ids, "padding_mask": REAL}
    start = np.zeros((len(ids), 1), int)
    return theirs, model, params, ids, {"prompt": start, "source": ids, "source_padding_mask": REAL}


def written(theirs, ids, **options):
    """What they write behind a prompt, or behind the start token, and the scores they draw by."""
    import torch

    given = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(REAL * 1)}
    said = theirs.generate(
        **given, **options, return_dict_in_generate=True, output_scores=True, pad_token_id=3
    )
    behind = 1 if theirs.config.is_encoder_decoder else ids.shape[1]
    return said.sequences.numpy()[:, behind:], [a.numpy() for a in said.scores]


def test_greedy_text(both):
    """Without an end, and with several: a row that is over holds nothing else."""
    theirs, model, params, ids, given = both
    prompt = given.pop("prompt")
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    expected, _ = written(theirs, ids, **options)
    got = np.asarray(generate(params, prompt, model.config, NEW, **given))
    np.testing.assert_array_equal(got, expected)
    assert len(np.unique(got)) >= 4  # not one token again and again
    ends = [int(got[0, 4]), int(got[1, 2]), int(got[2, 6])]
    expected, _ = written(theirs, ids, **options | {"eos_token_id": ends})
    got = np.asarray(generate(params, prompt, model.config, NEW, end=ends, **given))
    for row, full in zip(got.tolist(), expected.tolist(), strict=True):
        last = min([full.index(e) for e in ends if e in full], default=NEW) + 1
        assert row[:last] == full[:last]
        assert set(row[last:]) <= {ends[0]}
        assert set(full[last:]) <= {3}


LIMITS = (
    {"temperature": 1.7},
    {"temperature": 0.6, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.85},
)


def test_what_is_drawn(both):
    """The probabilities of the next token are theirs; `generate` draws by them: `test_decoding`."""
    theirs, model, params, ids, given = both
    prompt = given.pop("prompt")
    if model.config.kind == "decoder":
        cache = model.config.init_cache(len(ids), 9)
        logits = prefill(params, prompt, model.config, cache, padding_mask=REAL).logits
    else:
        logits = model.apply({"params": params}, prompt, **given).logits
    for limits in LIMITS:
        options = {"top_k": 0, "top_p": 1.0} | limits
        _, (scores, *_) = written(
            theirs, ids, max_new_tokens=1, do_sample=True, eos_token_id=None, **options
        )
        expected = np.asarray(jax.nn.softmax(scores))
        probs = jax.nn.softmax(limit_logits(logits[:, -1], **limits))
        np.testing.assert_allclose(probs, expected, atol=1e-4)
        np.testing.assert_array_equal(np.asarray(probs) > 0, expected > 0)
