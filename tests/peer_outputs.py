"""Runs a model of ours on a peer's inputs and compares it with the peer's outputs."""

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
    "cross_attentions": "cross_probs",
    "encoder_attentions": "encoder_probs",
    "encoder_last_hidden_state": "encoded",
}


def run(model, params, given):
    """`Outputs` for a peer's keyword arguments."""
    given = {name: jnp.asarray(a) for name, a in given.items()}
    if "pixel_values" in given:
        ids, real = jnp.moveaxis(given["pixel_values"], 1, -1).astype(jnp.float32), None
    else:
        ids, real = given["input_ids"], given["attention_mask"] == 1
    if model.config.kind == "encoder_decoder":
        texts, options = (ids, given["decoder_input_ids"]), {}
    else:
        texts = (ids,)
        options = dict(token_types=given.get("token_type_ids"), positions=given.get("position_ids"))

    @jax.jit
    def apply(params):
        return model.apply(
            {"params": params},
            *texts,
            padding_mask=real,
            return_outputs=True,
            return_probs=True,
            **options,
        )

    return apply(params)


def compare(seen, expected, close):
    """Checks what both have and returns its names (ours)."""
    compared = {}
    for theirs, ours in OUTPUTS.items():
        if theirs in expected and getattr(seen, ours) is not None:
            compared[ours] = (getattr(seen, ours), expected[theirs])
    if seen.logits is None and "logits" in expected:
        compared["classes"] = (seen.classes, expected["logits"])
    if seen.encoder_hidden is not None:
        # Of two texts, "last_hidden_state" and "hidden_states" are of the one or the other.
        expected = {name: a for name, a in expected.items() if name != "hidden_states"}
    for theirs, ours, last in (
        ("hidden_states", "hidden", "last"),
        ("decoder_hidden_states", "hidden", "last"),
        ("encoder_hidden_states", "encoder_hidden", "encoded"),
    ):
        if theirs in expected and getattr(seen, ours) is not None:
            # Where there is a final norm, the peer shows its output in the last layer's place.
            layers = np.concatenate([getattr(seen, ours)[:-1], getattr(seen, last)[None]])
            compared[ours] = (layers, expected[theirs])
    for got, wanted in compared.values():
        assert got.shape == wanted.shape
        close(got, wanted)
    return compared
