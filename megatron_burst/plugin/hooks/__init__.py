"""What is attached to a built model: the loss, the order of tokens, savings, rotary.

A hook attaches one thing, per instance, by Megatron's pre-wrap hooks; the other modules serve them.
A new hook is a module here and a line in `plugin/attach.py`.
"""
