"""Python's garbage collector stands still while a call is planned. (fast tier)"""

import gc
from typing import Any

import pytest
import torch

from megatron_burst import BurstConfig, BurstContext, Mask
from megatron_burst.attention.preparing import prepare
from megatron_burst.plans.choice import kv_or_latents
from megatron_burst.plans.gc_pause import without_gc


def test_it_stands_still_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    choose = kv_or_latents.choose

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.append(gc.isenabled())
        return choose(*arguments, **options)

    monkeypatch.setattr(kv_or_latents, "choose", watched)
    x = torch.zeros(1, 8, 1, 8)
    prepare(BurstContext.create(BurstConfig()), x, x, x, Mask.causal(), 1.0)
    assert seen == [False] and gc.isenabled()


def test_one_that_is_off_stays_off_and_an_error_changes_nothing() -> None:
    with pytest.raises(ValueError, match="wrong"), without_gc():
        raise ValueError("wrong")
    assert gc.isenabled()
    gc.disable()
    try:
        with without_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
