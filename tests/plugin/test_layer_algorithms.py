"""The settings of layers that run another algorithm than the model's. (fast tier)"""

import pytest

from megatron_burst import BurstConfig
from megatron_burst.config import Algorithm
from megatron_burst.plugin.attention.layer_algorithms import config_of


@pytest.mark.parametrize("algorithm", [a for a in Algorithm if a is not Algorithm.BURST])
def test_baseline_layers_are_not_refused_for_what_burst_is_tuned_by(algorithm: Algorithm) -> None:
    tuned = {"backward": "query", "topology": "mesh", "memory_mb": 64}
    config = BurstConfig(**tuned, mla="latent", grad_dtype="model", kernel="reference")
    found, default = config_of(config, algorithm), BurstConfig()
    assert found.algorithm is algorithm and found.kernel == "reference"
    assert all(getattr(found, name) == getattr(default, name) for name in tuned)
