"""Attention over the ranks of a group: the loop over a plan, its autograd, and the context.

`context.py` holds the group, `preparing.py` plans a call, `loop.py` runs its plan for the two
of `passes.py`, `sums.py` keeps what comes of it, `autograd.py` ties them together. What results
are compared with is in `megatron_burst/reference/`.
"""
