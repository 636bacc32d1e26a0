"""The LM head fused with the cross entropy, in chunks of tokens.

`function.py` is what others call, `call.py` what they ask for; `loops.py` runs over the chunks,
which `tokens.py` gathers from the ranks, and `chunk.py` does the mathematics of one. A new way to
multiply goes to `products.py`.
"""
