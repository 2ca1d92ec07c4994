"""What stands around the heads: layers, embeddings, readouts, models, decoding, budgets."""

from attnlab.model.accounting import applied_parameters, flops_per_token, unique_parameters
from attnlab.model.block import transformer_block
from attnlab.model.config import ModelConfig
from attnlab.model.decode import generate, prefill, stream
from attnlab.model.explain import explain_model
from attnlab.model.layers import run_layers
from attnlab.model.models import Decoder, Encoder, EncoderDecoder, Outputs
from attnlab.model.modules import FeedForward, LayerStack, MultiHeadAttention
from attnlab.model.pointwise import feed_forward

__all__ = [
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "FeedForward",
    "LayerStack",
    "ModelConfig",
    "MultiHeadAttention",
    "Outputs",
    "applied_parameters",
    "explain_model",
    "feed_forward",
    "flops_per_token",
    "generate",
    "prefill",
    "run_layers",
    "stream",
    "transformer_block",
    "unique_parameters",
]
