"""Which rank gets which tokens of which document, so that all compute as much."""
