"""`megatron-burst launch`: trainings on this machine, on nodes over ssh, and by Slurm.

Nothing here needs more than Python: a login node, or a host whose container has torch, has none.
"""
