"""Copies to a GPU come from pinned pages and do not wait. (fast tier)"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_burst.attention.launches import launches_of
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import flat_grid
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.transport.pinned import to_device


class Copies(TorchDispatchMode):
    """Fails where the host would wait for a copy to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self._pinned = 0, list[Tensor]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if kwargs.get("pin_memory"):
            self._pinned.append(result)
        if function is torch.ops.aten._to_copy.default and result.is_cuda and args[0].is_cpu:
            storage = args[0].untyped_storage()._cdata
            assert kwargs["non_blocking"]
            assert any(x.untyped_storage()._cdata == storage for x in self._pinned)
            self.count += 1
        return result


def test_on_the_cpu_a_tensor_stays_as_it_is() -> None:
    x = torch.arange(3)
    assert to_device(x, torch.device("cpu")) is x


def test_what_goes_to_a_gpu_is_pinned() -> None:
    bounds = tuple(range(0, 65, 4))
    schedule = Ring(Tiling(zigzag(64, 2), Mask.causal(documents=bounds)), flat_grid(2))
    device, plan = torch.device("cuda"), schedule.forward(0)
    with FakeTensorMode(), Copies() as copies:
        assert to_device(torch.arange(3), device).is_cuda
        launches_of([plan], 1, device)
    assert copies.count > 1, "tables of rows, too"
