"""Counts the bytes of all tensors that are alive, by watching every operation of torch."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations have made and that still exist.

    It sees what operations return, so not what a kernel uses inside. `existing` are tensors that
    were there before. Works on the device "meta", too, on which nothing is computed.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._kept = [tensor.untyped_storage() for tensor in existing]
        self._seen = {storage._cdata for storage in self._kept}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
