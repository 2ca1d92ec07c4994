"""The model card of a saved model: README.md, as the Hugging Face Hub shows it."""

import jax

from attnlab.models.config import ModelConfig
from attnlab.sharing import Params
from attnlab.transforms.convert import Conversion


def make_card(config: ModelConfig, params: Params, conversion: Conversion | None = None) -> str:
    """Markdown that says what the model is, how it was converted, and how to load it.

    >>> from attnlab.models import param_shapes
    >>> config = ModelConfig(width=8, num_layers=2)
    >>> [line for line in make_card(config, param_shapes(config)).splitlines() if "8," in line]
    ['| width, layers, heads | 8, 2, 4 |']
    """
    count = sum(a.size for a in jax.tree.leaves(params))
    lines = [
        "---",
        "library_name: attnlab",
        "---",
        "",
        f"# {config.kind.replace('_', '-')}, {count:,} parameters",
        "",
        "| | |",
        "|---|---|",
        f"| width, layers, heads | {config.width}, {config.num_layers}, {config.heads.num_heads} |",
        f"| head layout | `{config.heads!r}` |",
        f"| sharing plan | `{config.sharing}` |",
        f"| vocabulary, length | {config.vocab_size:,}, {config.max_len:,} |",
    ]
    if conversion is not None:
        lines += [
            "",
            "## Conversion",
            "",
            f"The heads became `{conversion.layout!r}`, which is the same function.",
            "",
            *(f"{i}. {step}" for i, step in enumerate(conversion.steps, 1)),
            "",
            "Largest measured difference, relative to the largest value: output "
            f"{conversion.forward_error:.1e}, gradient {conversion.gradient_error:.1e}.",
        ]
    lines += [
        "",
        "## Use",
        "",
        "```python",
        "from attnlab import pretrained",
        "",
        'model, params = pretrained.load("this folder, or its name on the hub")',
        "```",
        "",
    ]
    return "\n".join(lines)
