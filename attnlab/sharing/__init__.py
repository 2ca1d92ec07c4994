"""Which layer uses which weights? Plans, one scan that runs any of them; `surgery` changes a
model that has its weights already (it knows models, so it is imported by its own name)."""

from attnlab.sharing.named import PLANS, name_of, named, plan_names
from attnlab.sharing.plan import Plan
from attnlab.sharing.stack import init_pool, run_stack

__all__ = [
    "PLANS",
    "Plan",
    "init_pool",
    "name_of",
    "named",
    "plan_names",
    "run_stack",
]
