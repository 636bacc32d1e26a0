"""Who sends what to whom and computes which tile when."""
