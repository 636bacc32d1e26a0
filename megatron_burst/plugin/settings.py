"""What parsed arguments ask of us, by our flags and by Megatron's: read in one place."""

import argparse
import dataclasses
import logging
from typing import Any, NamedTuple

from megatron_burst.config import (
    Algorithm,
    BurstConfig,
    FlagConfig,
    LmHeadConfig,
    LmHeadLoss,
    Mla,
    Refused,
    positive,
    refuse,
)
from megatron_burst.plugin.flags import attention_flags, flags
from megatron_burst.plugin.limits import LATENT_LIMITS, MEGATRON, MLP_LIMITS, MLP_WORKING
from megatron_burst.plugin.refusals import (
    broken_limits,
    documents_flag,
    lm_head_refusals,
    refuse_all,
    sharding_refusals,
)
from megatron_burst.plugin.training_config import FileChecks, FileConfig, LayerConfig, MlpConfig

logger = logging.getLogger(__name__)


class Settings(NamedTuple):
    """What a model is to have of us; each part is None where it stays Megatron's."""

    attention: BurstConfig | None
    layers: LayerConfig | None  # with our attention
    head: LmHeadConfig | None
    mlp: MlpConfig | None

    @property
    def flags(self) -> str:
        """Name the flags that ask for something in a model; empty where none does."""
        named = []
        if self.attention is not None:
            named.append(f"--context-parallel-algo {self.attention.algorithm}")
        if self.head is not None:
            named.append(f"--lm-head-loss {self.head.loss}")
        if self.mlp is not None:
            named.append(f"--mlp-chunks {self.mlp.chunks or 'auto'}")
        return " and ".join(named)


def settings_of(args: argparse.Namespace) -> Settings:
    """Read parsed arguments; again where a script or a checkpoint may have changed them.

    Raises:
        ValueError: a value is unknown, a flag would have no effect, or an argument of Megatron
            cannot be honoured.
    """
    refused = Refused()
    settings = read_settings(args, refused)
    refuse(refused)
    return settings


def read_settings(args: argparse.Namespace, refused: Refused) -> Settings:
    """Read parsed arguments; a part that is refused is None, with the reasons in `refused`."""
    ours = args.context_parallel_algo != MEGATRON
    settings = Settings(
        refused.by(burst_config_from_args, args),
        refused.by(LayerConfig, **_values(args, LayerConfig)) if ours else None,
        refused.by(lm_head_config_from_args, args),
        refused.by(mlp_config_from_args, args),
    )
    if settings.flags:
        what = f"{settings.flags} cannot run this"
        refused.by(refuse_all, what, sharding_refusals(args))
    return settings


def tokens_of_rank(args: argparse.Namespace) -> int | None:
    """Return how many tokens a context-parallel rank has of a micro-batch; None: not known."""
    if args.seq_length is None or args.micro_batch_size is None:
        return None
    return int(args.micro_batch_size * args.seq_length // args.context_parallel_size)


def burst_config_from_args(args: argparse.Namespace) -> BurstConfig | None:
    """Return the configuration that the flags describe; None for Megatron's own attention."""
    values = _values(args, BurstConfig)
    if values["algorithm"] != MEGATRON:
        refuse(positive({"--distributed-timeout-minutes": args.distributed_timeout_minutes}))
        config = BurstConfig(**values, timeout_seconds=60.0 * args.distributed_timeout_minutes)
        return _with_heads_at_home(args, with_sendable_latents(args, config))
    given = {**values, **_values(args, LayerConfig)}
    idle = [
        f"{flag.name} {given[flag.field]}"
        for flag in attention_flags()
        if flag.field != "algorithm" and str(given[flag.field]) != str(flag.default)
    ]
    if idle:
        raise ValueError(
            f"{', '.join(idle)} has no effect under --context-parallel-algo {MEGATRON}; add "
            f"--context-parallel-algo {Algorithm.BURST}"
        )
    return None


def with_sendable_latents(args: argparse.Namespace, config: BurstConfig) -> BurstConfig:
    """Return the settings with K and V sent where it is known that latents cannot be."""
    reasons, has_latents = broken_limits(LATENT_LIMITS, args), args.multi_latent_attention
    if config.mla is Mla.LATENT:
        if not has_latents:
            reasons.append("the model has none: add --multi-latent-attention")
        refuse_all(f"--burst-mla {config.mla} cannot run this", reasons)
    elif reasons and has_latents and config.mla is Mla.AUTO:
        logger.info("--burst-mla %s: %s", Mla.HEADS, "; ".join(reasons))
        return dataclasses.replace(config, mla=Mla.HEADS)
    return config


def _with_heads_at_home(args: argparse.Namespace, config: BurstConfig) -> BurstConfig:
    """Return the settings with no heads shared out where rings send less, or are asked for."""
    if config.head_parallel_size or config.algorithm is not Algorithm.BURST:
        return config
    why = "rings are asked for by --hierarchical-context-parallel-sizes"
    if documents_flag(args):
        why = "rings send less under documents"
    elif not args.hierarchical_context_parallel_sizes:
        return config
    logger.info("--burst-head-parallel-size 1: %s", why)
    return dataclasses.replace(config, head_parallel_size=1)


def lm_head_config_from_args(args: argparse.Namespace) -> LmHeadConfig | None:
    """Return the settings of the chunked loss; None for Megatron's own."""
    config = LmHeadConfig(**_values(args, LmHeadConfig))
    if config.loss is LmHeadLoss.MEGATRON:
        return None
    refuse_all(f"--lm-head-loss {config.loss} cannot run this", lm_head_refusals(args))
    return config


def mlp_config_from_args(args: argparse.Namespace) -> MlpConfig | None:
    """Return the settings of MLPs in chunks; None for Megatron's own."""
    config = MlpConfig(**_values(args, MlpConfig))
    if config.chunks == 1:
        return None
    modules = {"mlp", "shared_experts", "moe"} & set(args.recompute_modules or ())
    selective = args.recompute_granularity == "selective" or vars(args).get("recompute_activations")
    reasons = broken_limits(MLP_LIMITS, args, MLP_WORKING)
    if selective and modules:
        named = " ".join(sorted(modules))
        reasons.append(f"--recompute-modules {named}: chunks recompute it: drop it there")
    refuse_all("--mlp-chunks cannot run this", reasons)
    return config


def checks_files(args: argparse.Namespace, *, own_entry: bool) -> bool:
    """Return whether --burst-check-files asks for the checks; ValueError for an unknown value."""
    checks = FileConfig(**_values(args, FileConfig)).check_files
    return own_entry if checks is FileChecks.AUTO else checks is FileChecks.ON


def _values(args: argparse.Namespace, config: type[FlagConfig]) -> dict[str, Any]:
    return {x.field: getattr(args, x.name[2:].replace("-", "_")) for x in flags(config)}
