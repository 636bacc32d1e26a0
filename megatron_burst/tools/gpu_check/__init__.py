"""What one GPU can say of this package: a file a stage, each a generator of `Check`s."""
