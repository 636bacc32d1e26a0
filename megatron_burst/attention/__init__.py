"""Attention over the ranks of a group: the loops over a plan, their autograd, and the context.

`context.py` prepares a call, `forward.py` and `backward.py` run its plan, `autograd.py` ties them
together. `dense.py` is the unsharded reference and `verify.py` compares with it; a new check of
results goes there.
"""
