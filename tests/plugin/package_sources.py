"""Finds a name of a package and what it takes: installed, by import, or in its sources, by ast."""

import ast
import functools
import importlib
import importlib.util
import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest


class Package(Protocol):
    def parameters(self, name: str) -> set[str]:
        """What a function, or a class when it is made, takes; AttributeError if there is none."""
        ...

    def bases(self, name: str) -> set[str]:
        """The names of a class's base classes, all the way up as far as they are visible."""
        ...


def find(package: str, variable: str) -> Package:
    """The package in the folder that an environment variable names, else the installed one."""
    if variable in os.environ:
        folder = Path(os.environ[variable])
        assert (folder / package).is_dir(), f"{variable}={folder} has no folder {package}"
        return Sources(folder)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed, and {variable} names no folder with its sources")
    return Installed()


class Installed:
    def parameters(self, name: str) -> set[str]:
        found = self._get(name)
        # A function of an extension shows no signature.
        return set() if inspect.isbuiltin(found) else set(inspect.signature(found).parameters)

    def bases(self, name: str) -> set[str]:
        return {f"{base.__module__}.{base.__qualname__}" for base in self._get(name).__mro__[1:]}

    def _get(self, name: str) -> object:
        module, _, last = name.rpartition(".")
        return getattr(importlib.import_module(module), last)


@dataclass(frozen=True)
class Sources:
    folder: Path

    def parameters(self, name: str) -> set[str]:
        node, module = self._find(name)
        if isinstance(node, ast.ClassDef):
            made_by = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            inits = [n for n in made_by if n.name == "__init__"]
            if not inits:
                return set().union(*(self.parameters(base) for base in self._inside(node, module)))
            node = inits[0]
        if not isinstance(node, ast.FunctionDef):
            return set()
        arguments = node.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        return {argument.arg for argument in every} - {"self"}

    def bases(self, name: str) -> set[str]:
        node, module = self._find(name)
        assert isinstance(node, ast.ClassDef), name
        inside = self._inside(node, module)
        written = {ast.unparse(base) for base in node.bases}
        return written.union(inside, *(self.bases(base) for base in inside))

    def _inside(self, node: ast.ClassDef, module: str) -> list[str]:
        """The bases of a class that lie in these sources, by their whole names."""
        names = [f"{module}.{ast.unparse(base)}" for base in node.bases]
        return [name for name in names if self._exists(name)]

    def _exists(self, name: str) -> bool:
        try:
            self._find(name)
        except AttributeError:
            return False
        return True

    def _find(self, name: str) -> tuple[ast.stmt, str]:
        """The statement that defines a name, through imports, and the module that it is in."""
        module, _, last = name.rpartition(".")
        file = self._file(module)
        for node in _statements_of(file):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == last:
                return node, module
            if isinstance(node, ast.Assign) and last in map(ast.unparse, node.targets):
                return node, module
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) not in (last, "*"):
                        continue
                    origin = self._absolute(node, module)
                    if not (self.folder / origin.split(".")[0]).is_dir():
                        if alias.name == "*":
                            continue
                        return node, module  # an extension, or another package
                    found = f"{origin}.{last if alias.name == '*' else alias.name}"
                    if self._exists(found):
                        return self._find(found)
        raise AttributeError(f"{module} ({file}) has no {last}")

    def _file(self, module: str) -> Path:
        base = self.folder.joinpath(*module.split("."))
        for file in (base / "__init__.py", base.with_suffix(".py")):
            if file.is_file():
                return file
        raise AttributeError(f"there is no module {module} in {self.folder}")

    def _absolute(self, node: ast.ImportFrom, module: str) -> str:
        if not node.level:
            return str(node.module)
        is_package = self._file(module).name == "__init__.py"
        parts = module.split(".")[: None if is_package and node.level == 1 else -node.level]
        if is_package and node.level > 1:
            parts = module.split(".")[: -(node.level - 1)]
        return ".".join([*parts, *([node.module] if node.module else [])])


@functools.cache
def _statements_of(file: Path) -> list[ast.stmt]:
    return _statements(ast.parse(file.read_text()))


def _statements(tree: ast.AST) -> list[ast.stmt]:
    """The statements of a module, those inside if and try, too."""
    found: list[ast.stmt] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
            found += _statements(node)
        elif isinstance(node, ast.stmt):
            found.append(node)
    return found
