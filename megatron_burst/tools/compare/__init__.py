"""Trains the same model on the same data through several algorithms and holds them side by side."""
