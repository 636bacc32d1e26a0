"""The LM head fused with the cross entropy, in chunks of tokens.

`function.py` is what others call, `call.py` chooses how, `loops.py` runs over the chunks and
`chunk.py` does the mathematics of one. A new form of the loss is a new `objective.py`, a new way to
multiply goes to `products.py`.
"""
