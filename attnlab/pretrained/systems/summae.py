"""The Transformer of SummAE (Liu et al. 2019, arXiv 1910.00998; google-research/summae), in the
names of its graph.

Its decoder adds the input of the FFN twice, 2 x + f(norm(x)): the residual is added once by the
sublayer's post-processing and once more by the layer.
"""

from attnlab.heads import Standard
from attnlab.models.config import EncoderConfig, ModelConfig
from attnlab.models.specs import FFN, Embedding, Norm, OutputHead, Sinusoidal
from attnlab.nested import JSON
from attnlab.pretrained.name_table import Layers, Module, NameTable, Stack, Suffixes, linears
from attnlab.pretrained.systems.arrays import Built, depth, require, take
from attnlab.pretrained.tensors import Arrays

PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "output_proj"}


def _stack(stack: Stack) -> Layers:
    norm, modules = "preprocess/LayerNorm", list[Module]()
    for sublayer, name in {"attention": "self_attention", "cross": "encdec_attention"}.items():
        modules += linears(f"{name}/", sublayer, **PROJECTIONS)
        modules.append(Module(f"{name}/{norm}", f"{sublayer}.norm", "norm"))
    modules += linears("ffn/ffn/", "ffn", up="dense", down="dense_1")
    modules.append(Module(f"ffn/{norm}", "ffn.norm", "norm"))
    outer = (Module(f"{stack}/{norm}", "final_norm", "norm"),)
    return Layers(f"{stack}/layer_{{}}/", tuple(modules), stack, outer)


TABLE = NameTable(
    (Module("embedding", "embedding", "table"),),
    (_stack("encoder"), _stack("decoder")),
    Suffixes("/kernel", "/bias", "/gamma", "/beta", table="", linear="conv1d"),
)


def build(config: JSON, tensors: Arrays) -> Built:
    """Widths and depths are those of the arrays."""
    encoder_heads, num_heads, max_len = take(
        config, "num_encoder_heads", "num_decoder_heads", max_length=256
    )
    kernel = "encoder/layer_0/ffn/ffn/dense/kernel"
    require(tensors, "embedding", kernel)
    vocab, width = tensors["embedding"].shape
    model = ModelConfig(
        kind="encoder_decoder",
        vocab_size=vocab,
        max_len=max_len,
        width=width,
        num_layers=depth(tensors, r"decoder/layer_(\d+)/"),
        heads=Standard(num_heads=num_heads),
        ffn=FFN(width=tensors[kernel].shape[1], activation="relu", residual_scale=2.0),
        norm=Norm(eps=1e-12),
        positions=Sinusoidal(halves=True),
        embedding=Embedding(zero_token=0),
        output=OutputHead(kind="none"),
        encoder=EncoderConfig(
            num_layers=depth(tensors, r"encoder/layer_(\d+)/"), num_heads=encoder_heads
        ),
    )
    return model, TABLE.entries(model)
