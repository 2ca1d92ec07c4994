"""Which layer uses which weights? Plans, one scan that runs any of them, and surgery."""

from attnlab.sharing.plan import PLANS, Plan, name_of, named, plan_names
from attnlab.sharing.stack import init_pool, run_stack
from attnlab.sharing.surgery import replan, share, tie_encoder, unshare, untie_encoder

__all__ = [
    "PLANS",
    "Plan",
    "init_pool",
    "name_of",
    "named",
    "plan_names",
    "replan",
    "run_stack",
    "share",
    "tie_encoder",
    "unshare",
    "untie_encoder",
]
