"""Attention over the ranks of a group: the loop over a plan, its autograd, and the context.

`context.py` prepares a call, `loop.py` runs its plan for `forward.py` and `backward.py`, `sums.py`
keeps what comes of it, `autograd.py` ties them together. `dense.py` is the unsharded reference and
`verify.py` compares with it; a new check of results goes there.
"""
