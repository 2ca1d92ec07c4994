"""The systems whose weights `from_variables` reads."""

from collections.abc import Callable
from typing import Any

from attnlab.pretrained import former, google, summae, t2t, torch_layers
from attnlab.pretrained.variables import Arrays, Built

SYSTEMS: dict[str, Callable[[dict[str, Any], Arrays], Built]] = {
    "torch_mha": torch_layers.build_attention,
    "torch_layers": torch_layers.build_layers,
    "former": former.build,
    "seed_snippet": former.build_tutorial,
    "t2t": t2t.build,
    "google_bert": google.build_bert,
    "google_albert": google.build_albert,
    "summae": summae.build,
}
