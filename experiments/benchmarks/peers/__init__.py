"""What other libraries offer for the same work: peers to time ours beside.

All of them read our weights, so that a benchmark can check that it times one and the same thing.
"""
