"""One context-parallel group as attention sees it: its ranks, their grid and who sends to whom."""

import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.attention.agreed import AgreedCalls
from megatron_burst.attention.kept import Kept
from megatron_burst.attention.log import LogOnce
from megatron_burst.config import Algorithm, BurstConfig
from megatron_burst.kernels import check_kernel_name
from megatron_burst.kernels.inputs import check_group
from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.degree import choose_degree
from megatron_burst.plans.choice.head_parallel import HeadGroups, head_groups
from megatron_burst.plans.choice.layouts import make_layout
from megatron_burst.plans.choice.machine import H100, Machine
from megatron_burst.plans.schedules.plan import Channel
from megatron_burst.plans.schedules.topology import Grid, choose_grid, flat_grid
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.transport.agreement import Agreement
from megatron_burst.transport.comm import Communicator
from megatron_burst.transport.groups import Groups, make_groups, nodes_of_ranks
from megatron_burst.transport.links import machine_here, rate_between
from megatron_burst.transport.objects import check_agreement, gather_objects, of_first_rank
from megatron_burst.transport.warm_up import Connections

logger = logging.getLogger(__name__)

_LEARN = "choose the Ulysses degree, and learn by which links"


@dataclass(eq=False, repr=False)
class BurstContext:
    """One context-parallel group as this rank sees it; made by `create`, once a group."""

    config: BurstConfig
    group: dist.ProcessGroup | None  # None: this process alone
    grid: Grid  # of the ranks of one ring
    nodes: Sequence[Hashable]  # of the ranks of one ring
    communicator: Communicator
    heads: HeadGroups
    _: KW_ONLY
    connections: Connections | None = None  # None: nobody to send to
    memory_limit: float = math.inf  # bytes; see `choose`
    machine: Machine = H100
    beside: int = 1  # ranks of a node that share out heads with each other

    def __post_init__(self) -> None:
        self.rank = 0 if self.group is None else self.group.rank()
        self.ranks = self.grid.ranks * self.heads.size
        self.agreed = AgreedCalls(self.communicator, self.connections)
        self.should_log = LogOnce(self.rank)
        self.kept = Kept()

    def __deepcopy__(self, _: object) -> "BurstContext":
        """Return itself: a copied module runs in the same group, and that cannot be copied."""
        return self

    @classmethod
    def create(
        cls,
        config: BurstConfig,
        group: dist.ProcessGroup | None = None,
        *,
        hierarchy: Sequence[dist.ProcessGroup] | None = None,
        groups: Groups | None = None,
        shape: Shape | str = "",
    ) -> "BurstContext":
        """Make the context of `group`: a collective call of all ranks of the job.

        Every rank calls it at the same time with the group that it is in, because the rings use
        process groups of their own, and torch makes those with the whole job. The groups are of one
        size: a rank that is one by itself waits for nobody, and none may be beside larger ones.

        Args:
            config: the same on every rank.
            group: the context-parallel group; None takes all ranks of the job, or this process
                alone where torch.distributed is not initialised.
            hierarchy: process groups as Megatron makes them, which say who shares a node: this
                rank's group within its node and the one between the nodes.
            groups: process groups of the same ranks made beforehand; then the call is a collective
                of `group` alone.
            shape: of a rank's tensors in every call, by which the Ulysses degree is chosen where
                the configuration does not say; or, for the log, why there is none.

        Raises:
            ValueError: the ranks disagree on the configuration, or the kernel is unknown.
            TypeError: `group` is no process group; of a mesh of devices take `get_group()`.
        """
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        check_group(group)
        if group is None or group.size() == 1:
            return cls.alone(config)
        said = f"{config}, {shape}"
        check_agreement(group, "the configuration", said, config.timeout_seconds)
        check_kernel_name(config.kernel)
        memory_limit = _memory_limit(config, group)
        nodes = nodes_of_ranks(group, config.timeout_seconds, hierarchy, config.ranks_per_node)
        machine, size = _chosen_degree(config, group, nodes, shape, memory_limit)
        on_a_node = nodes.count(nodes[0])
        grid, ring_nodes, heads = _arranged(config, group, nodes, size)
        if groups is None:
            groups = make_groups(group, grid, heads, on_a_node, config.timeout_seconds, hierarchy)
        ranks = dist.get_process_group_ranks(group)
        connections = _connections(groups, ranks, heads, group.rank())
        agreement = Agreement(groups.agreement, config.timeout_seconds)
        communicator = Communicator(ranks, groups.channels, config.timeout_seconds, agreement)
        return cls(
            *(config, group, grid, ring_nodes, communicator, heads),
            connections=connections,
            memory_limit=memory_limit,
            machine=machine,
            beside=min(heads.size, on_a_node),
        )

    @classmethod
    def alone(cls, config: BurstConfig) -> "BurstContext":
        """Make the context of this process alone, which concerns no other one."""
        check_kernel_name(config.kernel)
        heads = head_groups((0,), config.head_parallel_size or 1)
        communicator = Communicator((), {}, config.timeout_seconds)
        return cls(config, None, flat_grid(1), (0,), communicator, heads)

    @property
    def can_send_latents(self) -> bool:
        """Whether a ring runs whose ranks have all heads; behind an all-to-all none has."""
        return self.heads.size == 1 and self.grid.ranks > 1

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent so far."""
        return self.communicator.bytes_sent

    def layout(self, tokens: int) -> Layout:
        """Return which tokens of a sequence each rank holds.

        Raises:
            ValueError: the sequence does not divide over the ranks.
        """
        return make_layout(self.config, tokens, self.ranks)

    def positions(self, tokens: int) -> Tensor:
        """Return the positions of this rank's rows in a sequence: int64 [local tokens]."""
        return self.layout(tokens).positions(self.rank)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's rows of the whole tensor `x` along `dim`."""
        return self.layout(x.shape[dim]).shard(x, self.rank, dim)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """Gather the shards of all ranks: the inverse of `shard`, a collective, no gradient."""
        x = x.detach().contiguous()
        shards = [x]
        if self.group is not None:
            shards = [torch.empty_like(x) for _ in range(self.ranks)]
            dist.all_gather(shards, x, group=self.group)
        return self.layout(x.shape[dim] * self.ranks).unshard(shards, dim)

    def gather[T](self, purpose: str, mine: T) -> list[T]:
        """Return what every rank has, a collective call; errors name its purpose."""
        if self.group is None:
            return [mine]
        return gather_objects(self.group, purpose, mine, self.config.timeout_seconds)

    def layout_of(self, tokens: int, given: Layout | None) -> Layout:
        """Return the layout of a call, `given` with it or the configuration's.

        Raises:
            ValueError: it is of another sequence or of other ranks, or no layout.
        """
        layout = given or self.layout(tokens)
        if (layout.tokens, layout.ranks) != (tokens, self.ranks):
            raise ValueError(
                f"the layout is of {layout.tokens} tokens on {layout.ranks} ranks, but q has "
                f"{tokens} on {self.ranks}"
            )
        layout.check()
        return layout


def _chosen_degree(
    config: BurstConfig,
    group: dist.ProcessGroup,
    nodes: Sequence[Hashable],
    shape: Shape | str,
    memory_limit: float,
) -> tuple[Machine, int]:
    """Return the machine and the Ulysses degree as the first rank knows them.

    What another reads of its node may differ. Between neighbours of the group are ranks, as those
    of tensor parallelism, that send the same to other nodes at the same time.
    """
    first, second, *_ = dist.get_process_group_ranks(group)
    between = rate_between(group, nodes) if config.algorithm is Algorithm.BURST else None

    def choose_here() -> tuple[Machine, int, str]:
        here = machine_here(between).shared_by(max(1, second - first))
        return here, *choose_degree(config, nodes, shape, memory_limit, here)

    machine, size, why = of_first_rank(group, _LEARN, choose_here, config.timeout_seconds)
    if why and group.rank() == 0:
        logger.info("burst attention: --burst-head-parallel-size %d: %s", size, why)
    return machine, size


def _arranged(
    config: BurstConfig,
    group: dist.ProcessGroup,
    nodes: Sequence[Hashable],
    size: int,
) -> tuple[Grid, Sequence[Hashable], HeadGroups]:
    """Return the grid of the ranks of a ring, their nodes, and who shares out heads."""
    # Ulysses spreads the heads over all ranks, be they of one node or not.
    everywhere = [0] * len(nodes), len(nodes)
    heads = head_groups(*(everywhere if config.algorithm is Algorithm.ULYSSES else (nodes, size)))
    nodes = [nodes[members[0]] for members in heads.groups]
    grid, why_flat = choose_grid(config.shape_of_rings, nodes)
    if why_flat and group.rank() == 0:
        logger.info("burst attention: a flat ring ordered by node, because %s", why_flat)
    return grid, nodes, heads


def _connections(groups: Groups, ranks: Sequence[int], heads: HeadGroups, rank: int) -> Connections:
    """Make NCCL's communicators; return what knows who is connected on them."""
    number, index = heads.coordinates(rank)
    numbers = dict.fromkeys(groups.channels, heads.ring(index))
    numbers[Channel.HEADS] = heads.groups[number]
    known = {channel: [ranks[n] for n in members] for channel, members in numbers.items()}
    connections = Connections(groups.channels, known)
    connections.make()
    return connections


def _memory_limit(config: BurstConfig, group: dist.ProcessGroup) -> float:
    """Return how many bytes attention may take for other ranks' blocks: the same on all ranks."""
    card = math.inf
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    purpose = "learn how much memory the other ranks have"
    return config.memory_limit(min(gather_objects(group, purpose, card, config.timeout_seconds)))
