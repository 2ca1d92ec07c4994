"""Attention kernels that have not run on the hardware they are for.

Importing this package registers the backend "splash":

>>> import jax, attnlab.contrib
>>> from attnlab import explain
>>> x = jax.ShapeDtypeStruct((1, 3, 2, 4), "float16")
>>> explain(x, x, x)["splash"]
'splash attention needs float32 or bfloat16, not float16'
"""

from attnlab.attention import register_backend
from attnlab.contrib.splash import refuse_splash, splash

register_backend("splash", splash, refuse_splash)
