"""From one head layout to another: exact maps, certificates, and witnesses that none exists."""

from attnlab.conversion.convert import (
    Certificate,
    Truncation,
    convert,
    permute_heads,
    regauge,
    truncate,
)
from attnlab.conversion.maps import MAPS
from attnlab.conversion.question import Witness

__all__ = [
    "MAPS",
    "Certificate",
    "Truncation",
    "Witness",
    "convert",
    "permute_heads",
    "regauge",
    "truncate",
]
