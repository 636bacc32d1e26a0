"""Layers with a state, Mamba-2 and gated delta nets, on contiguous shards: ranks pass states."""
