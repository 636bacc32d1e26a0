"""Says in one line what to install where a tool lacks an optional package."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_DISTRIBUTIONS = {"megatron": "'megatron-core==0.19.*'"}  # where it is not named like the package


@contextmanager
def extra(names: str, module: str) -> Iterator[None]:
    """Import packages of the extras `names` ("train,plot") inside.

    Where one is missing a module that is run as a command, `__main__`, ends with status 1 and one
    line; another gets the ModuleNotFoundError.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if module != "__main__" or package == "megatron_burst":
            raise
        sys.exit(
            f"megatron_burst: {package} is not installed: pip install "
            f"{_DISTRIBUTIONS.get(package, package)}, or all that this needs: "
            f"megatron-burst[{names}]"
        )
