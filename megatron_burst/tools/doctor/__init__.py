"""Says what is installed here, what would serve a model, and whether a command line will run."""
