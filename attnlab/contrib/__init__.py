"""Attention kernels that have not run on the hardware they are for.

Importing this package registers the backends "pallas_wide", "splash" and "tokamax":

>>> import jax, attnlab.contrib
>>> from attnlab import explain
>>> x = jax.ShapeDtypeStruct((1, 3, 2, 4), "float32")
>>> explain(x, x, x)["pallas_wide"]
'it is for heads 64 to 1024 wide, not 4'
"""

from attnlab.attention import register_backend
from attnlab.contrib.pallas_wide import interpreted, pallas_wide, refuse_pallas_wide
from attnlab.contrib.splash import refuse_splash, splash
from attnlab.contrib.tokamax import refuse_tokamax, tokamax

__all__ = ["interpreted"]

register_backend("pallas_wide", pallas_wide, refuse_pallas_wide)
register_backend("splash", splash, refuse_splash)
register_backend("tokamax", tokamax, refuse_tokamax)
