"""An optional package that brings a kernel: which versions serve, and its functions when used."""

import importlib
import importlib.metadata
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.torch_version import TorchVersion


@dataclass(frozen=True, slots=True)
class Package:
    """A package by the name that pip knows, and the versions whose signatures were checked."""

    distribution: str
    module: str  # that has the functions
    at_least: str
    below: str

    def reasons_against(self) -> list[str]:
        """Return why the package cannot be used: it is missing, or of another version."""
        installed = installed_version(self.distribution)
        wanted = f"at least {self.at_least} and below {self.below}"
        if installed is None:
            return [f"the package {self.distribution} ({wanted}) is not installed"]
        version = TorchVersion(installed)
        if version < self.at_least or version >= self.below:
            return [f"{self.distribution} {installed} is installed, not {wanted}"]
        return []

    def import_reasons(self) -> list[str]:
        """Return why the installed package cannot be imported, which may take seconds to find out.

        It may have been built for another torch, for example.
        """
        error = _import_error(self.module)
        return [f"{self.distribution} cannot be imported: {error}"] if error else []

    def functions(self) -> Any:
        """Return the module that has the functions."""
        return importlib.import_module(self.module)


@cache
def installed_version(distribution: str) -> str | None:
    """Return the version of a package; None where it is missing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever it is, other kernels serve
        return str(error) or type(error).__name__
    return None
