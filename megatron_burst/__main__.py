"""`python -m megatron_burst VERB`: what the console script `megatron-burst` runs."""

import sys

from megatron_burst.tools.command import main

if __name__ == "__main__":
    sys.exit(main())
