"""The unsharded reference in float64, and what compares attention with it."""
