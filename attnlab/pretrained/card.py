"""The model card of a saved model: README.md, as the Hugging Face Hub shows it."""

import jax

from attnlab.models.config import ModelConfig
from attnlab.sharing import Params
from attnlab.transforms.convert import Conversion

CARD = """\
---
library_name: attnlab
---

# {kind}, {count:,} parameters

| | |
|---|---|
| width, layers, heads | {config.width}, {config.num_layers}, {config.heads.num_heads} |
| head layout | `{config.heads!r}` |
| sharing plan | `{config.sharing}` |
| vocabulary, length | {config.vocab_size:,}, {config.max_len:,} |
{conversion}
## Use

```python
from attnlab import pretrained

model, params = pretrained.load("this folder, or its name on the hub")
```
"""
CONVERSION = """
## Conversion

The heads became `{found.layout!r}`, which is the same function.

{steps}

Largest measured difference, relative to the largest value: output {found.forward_error:.1e}, \
gradient {found.gradient_error:.1e}.
"""


def make_card(config: ModelConfig, params: Params, conversion: Conversion | None = None) -> str:
    """Markdown that says what the model is, how it was converted, and how to load it.

    >>> from attnlab.models import param_shapes
    >>> config = ModelConfig(width=8, num_layers=2)
    >>> [line for line in make_card(config, param_shapes(config)).splitlines() if "8," in line]
    ['| width, layers, heads | 8, 2, 4 |']
    """
    converted = ""
    if conversion is not None:
        steps = "\n".join(f"{i}. {step}" for i, step in enumerate(conversion.steps, 1))
        converted = CONVERSION.format(found=conversion, steps=steps)
    return CARD.format(
        kind=config.kind.replace("_", "-"),
        count=sum(a.size for a in jax.tree.leaves(params)),
        config=config,
        conversion=converted,
    )
