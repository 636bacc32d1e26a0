"""Checkpoints, data sets and compiled helpers: what lies on disks and may be truncated.

A new check of files before or during training goes here; it belongs to `--burst-check-files`.
"""
