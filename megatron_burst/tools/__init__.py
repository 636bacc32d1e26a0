"""Command-line tools around a training: the verbs of `megatron-burst`."""
