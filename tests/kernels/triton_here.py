"""Triton without a GPU: kernels interpreted on CPU tensors, or compiled for a GPU and looked at."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.experimental import gluon  # noqa: E402, F401  # its import refuses interpreted ones
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from megatron_burst.kernels import fused  # noqa: E402, F401

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
}


# What the interpreter changes and does not always restore.
CHANGED = tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base


@contextmanager
def interpreted(*modules: ModuleType) -> Iterator[None]:
    """Have Triton's interpreter run the kernels of these modules."""
    before = [(place, dict(vars(place))) for place in (*CHANGED, *modules)]
    for module in (tl, tl.standard, *modules):
        for name, value in [*vars(module).items()]:
            if isinstance(value, JITFunction):
                setattr(module, name, InterpretedFunction(value.fn))
    try:
        yield
    finally:
        for place, names in before:
            for name, value in names.items():
                if vars(place)[name] is not value:
                    setattr(place, name, value)


@dataclass(frozen=True)
class Compiled:
    """What is known of a kernel without running it."""

    registers: int
    spilled: int  # bytes
    loads: tuple[int, ...]  # bits of each load from global memory
    stores: tuple[int, ...]


def compiled(
    kernel: Any, capability: int, pointers: Mapping[str, torch.dtype | None], **constants: Any
) -> Compiled:
    """Compile a kernel for a GPU; its pointers are aligned as those of whole tensors are."""
    constants |= {name: None for name, dtype in pointers.items() if dtype is None}
    signature, aligned = {}, {}
    for number, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        if name in constants:
            signature[name] = "constexpr"
        elif dtype := pointers.get(name):
            signature[name] = POINTERS[dtype]
            if not parameter.do_not_specialize_on_alignment:
                aligned[number,] = [["tt.divisibility", 16]]
        else:
            signature[name] = parameter.annotation_type
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return _look(made.asm["ptx"], capability)


def _look(ptx: str, capability: int) -> Compiled:
    target = re.search(r"\.target (\w+)", ptx)
    assert target
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={target[1]}", "-o", "/dev/null", "-"]
    said = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    registers, spills = re.search(r"Used (\d+) reg", said), re.findall(r"(\d+) bytes spill", said)
    assert registers and spills, said
    widths = _widths("ld", ptx), _widths("st", ptx)
    return Compiled(int(registers[1]), sum(map(int, spills)), *widths)


def keys_of(kernel: Any) -> "Keys":
    """Stand in for a kernel where it is launched, and note what is compiled."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return Keys(create_function_from_signature(kernel.signature, kernel.params, backend))


@dataclass(frozen=True)
class Keys:
    """What kernels would be compiled for the launches so far."""

    bind: Any
    found: set[str] = field(default_factory=set)

    def __getitem__(self, _: tuple[int, ...]) -> "Keys":
        return self

    def __call__(self, *given: Any, **constants: Any) -> None:
        self.found.add(str(self.bind(*given, **constants)[1]))


def _widths(operation: str, ptx: str) -> tuple[int, ...]:
    found = re.findall(rf"{operation}\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx)
    return tuple(int(count or 1) * int(bits) for count, bits in found)
