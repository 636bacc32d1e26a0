"""What attention calls of one context-parallel group share: who is in it, and what was planned."""

import logging
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.attention.agreed import AgreedCalls, Recent
from megatron_burst.attention.asked import Asked
from megatron_burst.attention.call import AttentionCall
from megatron_burst.attention.head_exchange import HeadExchange
from megatron_burst.attention.log import Means, News, kind_of, log_choice
from megatron_burst.attention.rows import device_calls, own_parts
from megatron_burst.attention.saved import AttentionMemory
from megatron_burst.attention.sums import WireDtypes
from megatron_burst.config import Algorithm, BurstConfig, GradDtype
from megatron_burst.kernels import Kernel, check_kernel_name, select_kernel
from megatron_burst.plans.collector import without_collecting
from megatron_burst.plans.cost import LatentShape, Shape, room_pays
from megatron_burst.plans.degree import choose_degree
from megatron_burst.plans.head_parallel import HeadGroups, head_groups
from megatron_burst.plans.latents import choose_keys
from megatron_burst.plans.layout import Layout, boundary, first_saved_row
from megatron_burst.plans.machine import H100, Machine
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.planning import Choice, choose, make_layout
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.timing import Links
from megatron_burst.plans.topology import Grid, choose_grid, flat_grid
from megatron_burst.transport.agreement import Agreement
from megatron_burst.transport.comm import Communicator, warm_up
from megatron_burst.transport.groups import Groups, make_groups, nodes_of_ranks
from megatron_burst.transport.links import machine_here
from megatron_burst.transport.objects import check_agreement, gather_objects
from megatron_burst.transport.profiling import span

logger = logging.getLogger(__name__)

_LEARN = "learn what the first rank has chosen, and by which links"

type Plans = dict[Asked, AttentionCall]
type Kinds = tuple[tuple[Asked, float | None], ...]


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
    along_grid: bool = False  # whether messages keep to its rows and columns
    memory_limit: float = math.inf  # bytes; see `choose`
    machine: Machine = H100
    beside: int = 1  # ranks of a node that share out heads with each other

    def __post_init__(self) -> None:
        self.rank = 0 if self.group is None else self.group.rank()
        self.ranks = self.grid.ranks * self.heads.size
        self.agreed = AgreedCalls(self.communicator)
        self.is_news = News(self.rank)
        self._calls = Recent[Asked, AttentionCall]()
        self._ready = Recent[tuple[object, ...], AttentionCall]()  # with scale and pass
        self._exchanges = Recent[int | Layout, HeadExchange]()
        self._kinds = Recent[tuple[Asked, float | None], None]()  # of calls with documents
        self.means = Means()

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
        process groups of their own, and torch makes those with the whole job.

        Args:
            config: the same on every rank.
            group: the context-parallel group; None takes all ranks of the job, or this process
                alone where torch.distributed is not initialised.
            hierarchy: process groups to adopt, as Megatron makes them: this rank's group within its
                node and the one between the nodes.
            groups: process groups of the same ranks made beforehand; then the call is a collective
                of `group` alone.
            shape: of a rank's tensors in every call, by which the Ulysses degree is chosen where
                the configuration does not say; or, for the log, why there is none.

        Raises:
            ValueError: the ranks disagree on the configuration, the kernel is unknown, or the
                configuration makes no double ring of the given hierarchy.
        """
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        if group is None or group.size() == 1:
            check_kernel_name(config.kernel)
            heads = head_groups((0,), config.head_parallel_size or 1)
            alone = Communicator((), {}, config.timeout_seconds)
            return cls(config, None, flat_grid(1), (0,), alone, heads)
        said = f"{config}, {shape}"
        check_agreement(group, "the configuration", said, config.timeout_seconds)
        check_kernel_name(config.kernel)
        nodes = nodes_of_ranks(config, group, hierarchy)
        memory_limit = _memory_limit(config, group)
        chosen = None  # by the first rank, as what it reads of its node may differ elsewhere
        if group.rank() == 0:
            here = machine_here()
            chosen = here, *choose_degree(config, nodes, shape, memory_limit, here)
        of_first = gather_objects(group, _LEARN, chosen, config.timeout_seconds)[0]
        assert of_first is not None
        machine, size, why = of_first
        if why and group.rank() == 0:
            logger.info("burst attention: --burst-head-parallel-size %d: %s", size, why)
        # Ulysses spreads the heads over all ranks, be they of one node or not.
        everywhere = [0] * len(nodes), len(nodes)
        on_a_node = nodes.count(nodes[0])
        heads = head_groups(
            *(everywhere if config.algorithm is Algorithm.ULYSSES else (nodes, size))
        )
        nodes = [nodes[members[0]] for members in heads.groups]
        grid, why_flat = choose_grid(config.shape_of_rings, nodes)
        if why_flat and group.rank() == 0:
            logger.info("burst attention: a flat ring ordered by node, because %s", why_flat)
        if hierarchy is not None and grid.ranks_per_node * heads.size != hierarchy[0].size():
            raise ValueError(
                f"process groups of {' x '.join(str(g.size()) for g in hierarchy)} ranks were "
                f"given, but the configuration makes a {grid}; take --burst-topology double"
            )
        along_grid = hierarchy is not None and groups is None
        if groups is None:
            groups = make_groups(config, group, grid, hierarchy, heads.size)
        warm_up(groups.channels)
        ranks = dist.get_process_group_ranks(group)
        agreement = Agreement(groups.agreement, config.timeout_seconds)
        communicator = Communicator(ranks, groups.channels, config.timeout_seconds, agreement)
        return cls(
            *(config, group, grid, nodes, communicator, heads),
            along_grid=along_grid,
            memory_limit=memory_limit,
            machine=machine,
            beside=min(heads.size, on_a_node),
        )

    @property
    def kernel(self) -> Kernel:
        """The kernel of the last call."""
        return next(reversed(self._ready.values())).kernel

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

    def prepare(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        scale: float,
        soft_cap: float | None = None,
        memory: AttentionMemory | None = None,
        latents: LatentShape | None = None,
        layout: Layout | None = None,
    ) -> AttentionCall:
        """Choose the kernel and the plans for these tensors; see `ring_attention`.

        Of two passes with one memory the first is whole, the second's forward stops early.
        """
        tensors = q.shape, k.shape, v.shape, q.dtype, q.device
        deterministic = torch.are_deterministic_algorithms_enabled()
        asked = Asked(*tensors, mask, soft_cap, latents, layout, deterministic)
        key = asked, scale, memory and (memory.fraction, memory.saved is not None)
        return self._ready.recall(key, lambda: self._prepare(asked, scale, memory))

    @property
    def kinds(self) -> Kinds:
        """What calls with documents have asked for so far: at one point, of all ranks the same."""
        return tuple(self._kinds)

    def plan_ahead(
        self, kinds: Kinds, tokens: int, mask_of: Callable[[Mask], Mask], layout: Layout | None
    ) -> Plans:
        """Plan for other documents what these kinds of calls would ask for.

        For `adopt`. Until then calls see nothing of it, so a thread may plan while another one
        attends; all that changes is what was logged and the figures of `means`.

        Args:
            tokens: of the sequence; what was asked of other lengths is left out.
            mask_of: returns a mask with these documents, and the causality and window of another.
            layout: of the tokens; None is the configuration's.
        """
        plans: Plans = {}
        for kind, fraction in kinds:
            if kind.q[1] * self.grid.ranks == tokens:
                whole = kind._replace(mask=mask_of(kind.mask), layout=layout)
                for asked in (whole, self._early(whole, fraction)):
                    plans[asked] = plans.get(asked) or self._plan(asked)
        return plans

    def adopt(self, plans: Plans) -> None:
        """Take over what was planned ahead."""
        for asked, call in plans.items():
            self._calls.keep(asked, replace(call, is_ahead=True))

    def exchange(self, local_tokens: int, layout: Layout | None = None) -> HeadExchange:
        """Return the all-to-all of this rank's group, made once for a length or a layout."""

        def make() -> HeadExchange:
            group, index = self.heads.coordinates(self.rank)
            whole = self._layout(local_tokens * self.ranks, layout)
            messenger = self.communicator.subgroup(self.heads.groups[group])
            return HeadExchange(index, self.heads.member_layout(whole, group), messenger)

        return self._exchanges.recall(layout or local_tokens, make)

    def _layout(self, tokens: int, given: Layout | None) -> Layout:
        layout = given or self.layout(tokens)
        if (layout.tokens, layout.ranks) != (tokens, self.ranks):
            raise ValueError(
                f"the layout is of {layout.tokens} tokens on {layout.ranks} ranks, but q has "
                f"{tokens} on {self.ranks}"
            )
        return layout

    def _prepare(self, asked: Asked, scale: float, memory: AttentionMemory | None) -> AttentionCall:
        second = None if memory is None or memory.saved is None else memory.fraction
        if asked.mask.documents is not None:
            self._kinds.keep((asked.kind, second), None)
        whole, early = self._call(asked), self._call(self._early(asked, second))
        plan, calls = early.forward_plan, early.forward_calls
        parts = {**whole.parts, **early.parts}
        call = replace(whole, forward_plan=plan, forward_calls=calls, parts=parts, scale=scale)
        call = replace(call, is_ahead=whole.is_ahead and early.is_ahead)
        if memory is None:
            return call
        layout = self._layout(asked.q[1] * self.grid.ranks, asked.layout)
        stop, number = boundary(layout, memory.fraction), self.heads.coordinates(self.rank)[0]
        row = first_saved_row(self.heads.ring_layout(layout), number, stop)
        return replace(call, first_saved_row=row)

    def _early(self, asked: Asked, fraction: float | None) -> Asked:
        """Return what the forward of a second pass needs; `fraction` is None in any other."""
        if fraction is None:
            return asked
        layout = self._layout(asked.q[1] * self.grid.ranks, asked.layout)
        stop = boundary(layout, fraction)
        early = replace(asked.mask, query_stop=None if stop == layout.tokens else stop)
        return asked._replace(mask=early)

    def _call(self, asked: Asked) -> AttentionCall:
        """Return what was planned, or plan it."""
        return self._calls.recall(asked, lambda: self._plan_now(asked))

    def _plan_now(self, asked: Asked) -> AttentionCall:
        begun = time.perf_counter()
        with span("wait for the plan"):
            call = self._plan(asked)
        # What is asked for the first time has to be waited for, but not other documents.
        is_early = asked.mask.query_stop is not None  # where it stops moves with every micro-batch
        is_new = asked.mask.documents is None or self.is_news((asked.kind, is_early))
        if not is_new and not self.rank and self.is_news("a wait"):
            logger.info(
                "burst attention: waited %.0f ms for the plan of other documents, and does so "
                "wherever they are not known a micro-batch before",
                1e3 * (time.perf_counter() - begun),
            )
        return call

    @without_collecting()
    def _plan(self, asked: Asked) -> AttentionCall:
        layout, mask = self._layout(asked.q[1] * self.grid.ranks, asked.layout), asked.mask
        tiling = Tiling(self.heads.ring_layout(layout), mask)
        choice, shape, instead = self._choose(tiling, asked)
        if mask.query_stop is None:
            self.means.add(mask, choice.forward[0].schedule.imbalance)
        sums_as = asked.dtype if self.config.grad_dtype is GradDtype.MODEL else None
        wire = WireDtypes(asked.dtype if shape.sends_raw else sums_as, sums_as)
        request = asked.request(is_banded=choice.is_banded)
        kernel = select_kernel(self.config.kernel, request)
        said = f"{choice}{instead}"
        if self.is_news((shape, *kind_of(mask))):
            log_choice(self.config, self.heads.size, self.grid, kernel, request, said, shape)
        number, index = self.heads.coordinates(self.rank)
        messenger = self.communicator
        if self.group is not None:
            messenger = messenger.subgroup(self.heads.ring(index))
        scale, plans = 1.0, choice.plans(number)  # `prepare` puts in each call's own scale
        forward, backward = device_calls(plans, asked.q[0], asked.device)
        return AttentionCall(
            *(*plans, kernel, scale, messenger, wire, asked.soft_cap),
            sends_latents=shape.latents is not None,
            leaves_room=room_pays(tiling, shape, choice.forward[0].cost),
            forward_calls=forward,
            backward_calls=backward,
            parts=own_parts(plans, asked.device),
            choice=said,
        )

    def _choose(self, tiling: Tiling, asked: Asked) -> tuple[Choice, Shape, str]:
        """Choose what travels and how; return for the log what does not."""
        config = self.config
        shape = asked.shape(config.grad_dtype)

        def choose_for(shape: Shape) -> Choice:
            return choose(
                *(config, tiling, self.grid, shape, self.nodes, self.along_grid),
                memory_limit=self.memory_limit,
                links=Links.of(self.nodes, shape, self.machine, self.beside),
            )

        return choose_keys(choose_for, shape, asked.latents, config)


def _memory_limit(config: BurstConfig, group: dist.ProcessGroup) -> float:
    """Return how many bytes attention may take for other ranks' blocks: the same on all ranks."""
    card = math.inf
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    purpose = "learn how much memory the other ranks have"
    return config.memory_limit(min(gather_objects(group, purpose, card, config.timeout_seconds)))
