"""Which layer uses which weights? Plans, one scan that runs any of them, and surgery."""

from attnlab.sharing.plan import COUNTED, PLANS, Plan, name_of, named
from attnlab.sharing.stack import init_slots, run_stack
from attnlab.sharing.surgery import replan, share, tie_encoder, unshare, untie_encoder

__all__ = [
    "COUNTED",
    "PLANS",
    "Plan",
    "init_slots",
    "name_of",
    "named",
    "replan",
    "run_stack",
    "share",
    "tie_encoder",
    "unshare",
    "untie_encoder",
]
