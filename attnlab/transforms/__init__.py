"""Functions on trained parameters: other head layouts, other sharing plans, other or fewer heads.

| function | takes | returns |
|---|---|---|
| `convert` | weights of a layout, a target layout | exact weights of the target, a proof that there are none, or neither |
| `approximate`, `approximate_model` | heads, or config and params, and other heads | nearly the same function with fewer keys, fewer heads or a latent, and its error |
| `convert_model` | config, params, other heads | the model with these heads, each group's error |
| `reparametrize`, `permute_heads` | weights of a layout | the same function in other bases, or with its heads in another order |
| `change_plan`, `unshare`, `detect_sharing`, `tie_encoder`, `untie_encoder` | config, params | config, params under another sharing plan |
| `remove_heads`, `scale_heads` | config, params | a model with fewer heads, or with scaled ones |
| `output_difference` | two models | how far their outputs differ |
"""  # noqa: E501

from attnlab.transforms.approximate import (
    Approximation,
    ModelApproximation,
    approximate,
    approximate_model,
)
from attnlab.transforms.convert import Conversion, NotEquivalent, Undecided, convert
from attnlab.transforms.convert_model import ModelConversion, convert_model
from attnlab.transforms.permute import permute_heads
from attnlab.transforms.pruning import remove_heads, scale_heads
from attnlab.transforms.reparametrize import reparametrize
from attnlab.transforms.resharing import (
    change_plan,
    detect_sharing,
    output_difference,
    tie_encoder,
    unshare,
    untie_encoder,
)

__all__ = [
    "Approximation", "Conversion", "ModelApproximation", "ModelConversion", "NotEquivalent",
    "Undecided", "approximate", "approximate_model", "change_plan", "convert", "convert_model",
    "detect_sharing", "output_difference", "permute_heads", "remove_heads", "reparametrize",
    "scale_heads", "tie_encoder", "unshare", "untie_encoder",
]  # fmt: skip
