"""Megatron without a GPU: the names that something else stands in for, and why.

`table.py` is the whole list, `platform.py` puts it in place, `arguments.py` has other defaults for
Megatron's flags. `torch_adam.py` serves GPUs, too: it mends what distributed
optimizers save, and torch's Adam where Apex and TransformerEngine are missing.
"""
