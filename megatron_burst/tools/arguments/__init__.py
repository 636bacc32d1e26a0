"""What the verbs that load torch read off the command line: a `parser()` each, without torch."""
