"""Counts the bytes of all tensors that are alive, by watching every operation of torch."""

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations have made and that still exist.

    It sees what operations return and `UntypedStorage.resize_`, so not what a kernel uses inside.
    `existing` are tensors that were there before. Works on the device "meta", too, on which nothing
    is computed.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._kept = [tensor.untyped_storage() for tensor in existing]
        self._seen = {storage._cdata for storage in self._kept}
        self._sizes: dict[int, int] = {}
        self._patch = ExitStack()

    def __enter__(self) -> Self:
        usual = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = usual(storage, size)
            if storage._cdata in self._sizes:
                self._forget(storage._cdata)
                self._count(storage)
            return result

        self._patch.enter_context(patch.object(torch.UntypedStorage, "resize_", resize))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.close()
        super().__exit__(*error)

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
        self._sizes[key] = storage.nbytes()
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._seen.discard(key)
        self.now -= self._sizes.pop(key, 0)
