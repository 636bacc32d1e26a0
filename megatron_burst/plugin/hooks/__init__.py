"""What is attached to a built model: the loss, the order of tokens, recompute's log, rotary.

Each module attaches one thing, per instance, by Megatron's pre-wrap hooks. A new hook is a module
here and a line in `plugin/attach.py`.
"""
