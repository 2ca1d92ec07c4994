"""Weights given as arrays under the names of the system they come from.

Beside folders (`load`): systems that have no config.json, or none with a model_type.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from attnlab.heads import Layout, weight_shapes
from attnlab.models.config import FlaxModel
from attnlab.models.flax import MultiHeadAttention
from attnlab.models.params import param_shapes
from attnlab.names import lookup
from attnlab.nested import JSON
from attnlab.pretrained.systems import former, google, t2t, torch
from attnlab.pretrained.systems.arrays import Built
from attnlab.pretrained.tensors import Arrays
from attnlab.pretrained.weights import fill
from attnlab.sharing import Params

SYSTEMS: dict[str, Callable[[JSON, Arrays], Built]] = {
    "torch_mha": torch.build_attention,
    "torch_layers": torch.build_layers,
    "former": former.build,
    "seed_snippet": former.build_tutorial,
    "t2t": t2t.build,
    "google_bert": google.build_bert,
    "google_albert": google.build_albert,
    "summae": t2t.build_summae,
}
"""Name -> (config, variables) -> what the variables belong to, and the name table."""


def from_variables(
    system: str, config: Mapping[str, object], variables: Mapping[str, ArrayLike]
) -> tuple[MultiHeadAttention | FlaxModel, Params]:
    """(model, params) of `variables`, named as in `system`; `config` has the system's own words.

    torch_mha      torch.nn.MultiheadAttention: embed_dim, num_heads; kdim, vdim, add_zero_attn
                   (which leaves no weight). A row that sees no key of its own is that of
                   `ExtraKeys` and `Sink`, in torch too.
    torch_layers   torch.nn.TransformerEncoderLayer, TransformerDecoderLayer, TransformerEncoder,
                   TransformerDecoder or Transformer: nhead; norm_first (False), activation
                   ("relu"), layer_norm_eps (1e-5, also of the final norm, whose epsilon torch
                   keeps apart), max_length. Takes vectors, floats
                   [B, T, d_model]; gives `Outputs.hidden`. A decoder is called with
                   (x, encoded=memory).
    former         pbloem/former. One attention: module="SelfAttention", "SelfAttentionWide",
                   "SelfAttentionNarrow" or "SelfAttentionAlt", emb, heads; a model:
                   module="GTransformer" or "CTransformer" with heads, attention_type
                   ("default", "wide", "narrow", "alt"), max_pool. revision="2019" scales scores by
                   1/sqrt(emb), "HEAD" (default) by 1/sqrt(width of a head), `scalefactor` by
                   itself; `kqnorm` is what the variables say.
    seed_snippet   the tutorial class with one chunk projection for all heads: embed_size, heads
    t2t            tensor2tensor's Transformer, encoder and decoder with one vocabulary: num_heads;
                   layer_postprocess_sequence "da" (default) or, as in the paper, "dan";
                   norm_epsilon, max_length. Decoder inputs are targets shifted right behind a 0.
    google_bert    bert_config.json of google-research/bert (whose gelu is the tanh kind)
    google_albert  albert_config.json of google-research/albert
    summae         TransformerEncoderDecoder of google-research/summae: num_encoder_heads,
                   num_decoder_heads, max_length. It takes vectors: the table that they come from
                   is the variable "embedding" [V, E]. Decoder inputs are targets shifted right
                   behind a 0, which is the zero vector; the model gives `Outputs.hidden`.

    A model of `former` ends in a log-softmax, ours in the logits before it.

    Args:
      system: a key of `SYSTEMS`.
      config: the words above -> values. Widths and depths that it does not have are those of the
        variables.
      variables: name in the system -> array, of a floating-point dtype.

    Returns:
      (model, params): attentions as a `MultiHeadAttention`, the rest as a `Transformer`; params are
      float32.

    Raises:
      ValueError: an unknown system; a word of `config` that is missing, unknown or does not fit; a
        variable that is missing, unknown, of a wrong shape or dtype, NaN or infinite. It is named.

    >>> variables = {"in_proj_weight": np.ones((12, 4)), "out_proj.weight": np.ones((4, 4))}
    >>> model, params = from_variables("torch_mha", {"embed_dim": 4, "num_heads": 2}, variables)
    >>> model.layout, params["heads"]["q"].shape
    (Standard(width=4, num_heads=2), (4, 2, 2))
    """
    tensors = {name: np.asarray(a) for name, a in variables.items()}
    built, entries = lookup(SYSTEMS, system, what="system")(dict(config), tensors)
    unknown = sorted(set(tensors) - {entry.name for entry in entries})
    if unknown:
        raise ValueError(f"{system} has no place for the variable {unknown[0]!r}")
    if isinstance(built, Layout):
        found = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in weight_shapes(built).items()}
        model: MultiHeadAttention | FlaxModel = MultiHeadAttention(built)
        shapes: Params = {"heads": found}
    else:
        model, shapes = built.build(), param_shapes(built)
    return model, jax.tree.map(jnp.asarray, fill(shapes, entries, tensors))
