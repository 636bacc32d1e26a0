"""Command-line tools around a training: each is run as `python -m megatron_burst.tools.NAME`."""
