"""Makes `attnlab/pretrained/words.json`: the words of config.json that can matter to each family.

    pip install -e ".[test,parity]" && python tests/pretrained/parity/words.py

They are read from the source of transformers: the arguments of a config class and of its bases,
`attribute_map`, and every name that the configuration and modelling files read from a config or
from keyword arguments. Words of the modules that all families use are listed once, under "all".
"""

import ast
import dataclasses
import functools
import importlib
import json
import sys
from pathlib import Path

import peers
import transformers

from attnlab.nested import JSON
from attnlab.pretrained import FAMILIES
from attnlab.pretrained.family import Family
from attnlab.pretrained.fields import Words

FILE = Path(peers.__file__).parents[3] / "attnlab" / "pretrained" / "words.json"
SHARED = (
    *("activations", "configuration_utils", "conversion_mapping", "core_model_loading"),
    *("integrations.eager_paged", "integrations.flash_attention", "integrations.flex_attention"),
    *("integrations.moe", "integrations.sdpa_attention", "masking_utils", "modeling_layers"),
    *("modeling_flash_attention_utils", "modeling_outputs", "modeling_rope_utils"),
    *("modeling_utils", "pytorch_utils"),
)
"""Modules that compute for every family, or read its weights."""


def main() -> None:
    FILE.write_text(json.dumps(table(), indent=1) + "\n")


def table() -> JSON:
    """{"transformers": version, "all": words, "families": {model_type: further words},
    "tokens": {model_type: {word: id where config.json has none}},
    "defaults": {model_type: {attribute that the family reads: value where config.json has none}}}.
    """
    common = {name for module in SHARED for name in _names(f"transformers.{module}")}
    common |= _arguments(transformers.PreTrainedConfig)
    families: dict[str, set[str]] = {}
    for model, config, _ in peers.PEERS.values():
        found = _arguments(config) | {*config.attribute_map, *config.attribute_map.values()}
        for cls in (*config.__mro__, *model.__mro__):
            if cls.__module__.startswith("transformers.models."):
                found |= _names(cls.__module__)
        families[config.model_type] = found | families.get(config.model_type, set())
    lines = {name: " ".join(sorted(found - common)) for name, found in sorted(families.items())}
    configs = {config.model_type: config for _, config, _ in peers.PEERS.values()}
    tokens = {name: _tokens(config()) for name, config in configs.items()}
    defaults = {name: _defaults(FAMILIES[name], config) for name, config in configs.items()}
    return {
        "transformers": transformers.__version__,
        "all": " ".join(sorted(common)),
        "families": lines,
        "tokens": dict(sorted(tokens.items())),
        "defaults": dict(sorted(defaults.items())),
    }


def _tokens(config: transformers.PreTrainedConfig) -> dict[str, object]:
    """The ids of special tokens that a config class fills in."""
    fields = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    return {n: token for n, token in fields if n.endswith("_token_id") and token is not None}


def _defaults(family: Family, config: type) -> dict[str, object]:
    """Those of a config class, for attributes that have a type and are read into the model."""
    theirs = {field.name: field.default for field in dataclasses.fields(config)}
    fields = (field for field in family.fields if not isinstance(field, Words))
    ours = [a for field in fields for a in field.attributes if a.kind or a.default is not None]
    return {a.name: theirs[a.name] for a in ours if theirs.get(a.name) is not None}


def _arguments(cls: type) -> set[str]:
    """Arguments of a config class, and names that it has already."""
    fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return fields | {name for name in dir(cls) if not name.startswith("_")}


@functools.cache
def _names(module: str) -> frozenset[str]:
    """Names that a module reads from a config or from keyword arguments."""
    source = Path(importlib.import_module(module).__file__ or "").read_text()
    configs = ("config", "cfg", "kwargs") + ("self",) * ("configuration" in module)
    nodes = [*ast.walk(ast.parse(source))]
    # Names that a loop reads by getattr.
    lists = [n for n in nodes if isinstance(n, ast.Tuple | ast.List) and "configuration" in module]
    names = {element.value for one in lists for element in one.elts if _is_name(element)}
    names = {name for name in names if name.islower()}
    return frozenset(names | {name for node in nodes if (name := _name(node, configs))})


def _name(node: ast.AST, configs: tuple[str, ...]) -> str | None:
    """The name that an expression reads from one of `configs`, if it is one that does."""
    key: ast.AST | None = None
    match node:
        case ast.Attribute(value=owner, attr=name):
            key = ast.Constant(name)
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, key, *_]):
            pass
        case ast.Call(func=ast.Attribute(value=owner, attr="pop" | "get"), args=[key, *_]):
            pass
        case ast.Subscript(value=owner, slice=key):
            pass
        case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[owner]):
            pass
        case _:
            return None
    is_config = getattr(owner, "attr", getattr(owner, "id", "")).endswith((*configs, "config_dict"))
    return key.value if is_config and _is_name(key) else None


def _is_name(node: ast.AST | None) -> bool:
    """Whether an expression is a string that may be the name of a word."""
    value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
    return isinstance(value, str) and value.isidentifier()


if __name__ == "__main__":
    sys.exit(main())
