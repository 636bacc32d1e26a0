"""What stands where Megatron's core attention stood, and what belongs to one call of it.

`core_attention.py` keeps Megatron's contract, `attention_choice.py` says which attention is
replaced. A new check of a call's tensors goes beside `nan_check.py`.
"""
