"""Runs a model on a peer's inputs and compares it with the peer's outputs."""

import jax
import jax.numpy as jnp
import numpy as np

# their name -> ours
OUTPUTS = {
    "logits": "logits",
    "prediction_logits": "logits",
    "last_hidden_state": "last",
    "pooler_output": "pooled",
    "seq_relationship_logits": "classes",
    "sop_logits": "classes",
    "attentions": "probs",
    "decoder_attentions": "probs",
    "cross_attentions": "cross.probs",
    "encoder_attentions": "encoder.probs",
    "encoder_last_hidden_state": "encoded",
    "hidden_states": "hidden",
    "decoder_hidden_states": "hidden",
    "encoder_hidden_states": "encoder.hidden",
}
NAMES = ("embeddings", "residual", "probs")


def inputs(config, given):
    """(tokens, keyword arguments) of a call of our model for a peer's keyword arguments."""
    given = {name: jnp.asarray(a) for name, a in given.items()}
    if "pixel_values" in given:
        return jnp.moveaxis(given["pixel_values"], 1, -1).astype(jnp.float32), {}
    ids, real = given["input_ids"], given["attention_mask"] == 1
    if config.kind == "encoder_decoder":
        return given["decoder_input_ids"], dict(source=ids, source_padding_mask=real)
    types, positions = given.get("token_type_ids"), given.get("position_ids")
    return ids, dict(padding_mask=real, token_types=types, positions=positions)


def run(model, params, given):
    """Name -> value: what a peer returns, by our names."""
    names = list(NAMES)
    if model.config.kind == "encoder_decoder":
        names += ["cross.probs", *(f"encoder.{name}" for name in NAMES)]
    tokens, options = inputs(model.config, given)

    @jax.jit
    def apply(params):
        return model.apply({"params": params}, tokens, capture=names, **options)

    outputs = apply(params)
    names = ("logits", "pooled", "classes", "encoded")
    found = {name: a for name in names if (a := getattr(outputs, name)) is not None}
    seen = outputs.captured
    found["last"] = outputs.hidden
    for at, last in (("", outputs.hidden), ("encoder.", outputs.encoded)):
        if f"{at}residual" in seen:
            # Where there is a final norm, the peer shows its output in the last layer's place.
            first = np.reshape(seen[f"{at}embeddings"], (1, *last.shape))
            found[f"{at}hidden"] = np.concatenate([first, seen[f"{at}residual"]])
            found[f"{at}hidden"][-1] = last
    return found | {name: a for name, a in seen.items() if name.endswith("probs")}


def compare(seen, expected, close):
    """Checks what both have and returns its names (ours)."""
    if "encoder.hidden" in seen:
        # Of two texts, "last_hidden_state" and "hidden_states" are of the one or the other.
        expected = {name: a for name, a in expected.items() if name != "hidden_states"}
    compared = {
        ours: (seen[ours], expected[theirs])
        for theirs, ours in OUTPUTS.items()
        if theirs in expected and ours in seen
    }
    if "logits" not in seen and "logits" in expected:
        compared["classes"] = (seen["classes"], expected["logits"])
    if "start_logits" in expected and "classes" in seen:
        answers = np.stack([expected[f"{end}_logits"] for end in ("start", "end")], axis=-1)
        compared["classes"] = (seen["classes"], answers)
    for got, wanted in compared.values():
        assert got.shape == wanted.shape
        close(got, wanted)
    return compared
