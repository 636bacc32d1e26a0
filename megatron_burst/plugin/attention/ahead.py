"""Prepares a micro-batch in a thread while the model runs the one before it.

Megatron reads a micro-batch when its forward begins; whatever the host does from then on, the
device waits for. So data iterators are read one item ahead, and after a forward, when the device
has enough to do, a thread makes all that the next documents need. What ranks have to tell each
other for it goes by a gloo group of its own.
"""

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import flatten_batch_for_packed_sequences

from megatron_burst.attention.context import BurstContext
from megatron_burst.attention.kept import DocumentCalls
from megatron_burst.attention.preparing import Plans, adopt
from megatron_burst.plugin.attention.documents import PackedDocuments, digest_of, with_tensors
from megatron_burst.plugin.attention.shared_state import SharedState
from megatron_burst.transport.groups import make_gloo_group
from megatron_burst.transport.objects import (
    any_rank,
    broadcast_object,
    check_agreement,
    gather_objects,
)
from megatron_burst.transport.profiling import span

logger = logging.getLogger(__name__)

_KEPT = 64  # micro-batches: more than a pipeline has in flight
_WHERE = "one micro-batch ahead"
_READ_OF_AN_ITEM = ("cu_seqlens", "cu_seqlens_padded", "tokens")

type Read = Callable[[PackedSeqParams], PackedDocuments]
type _Planned = tuple[PackedDocuments, list[tuple[BurstContext, Plans]]]
type _Prepared = dict[bytes, Future[_Planned]]  # by what a micro-batch says of its documents


class Ahead:
    """The micro-batches that are known before they come; all others are planned when they come.

    A micro-batch is found by what it says of its documents. So it does not matter in which order
    micro-batches come, how often, or whether one that was announced ever does. The thread returns
    what it has prepared, and has nothing else in common with who attends.
    """

    def __init__(self, shared: SharedState, tokens_per_sample: int | None = None) -> None:
        self._shared, self._tokens_per_sample = shared, tokens_per_sample
        self._group: dist.ProcessGroup | None = None  # who gets the same micro-batches
        self._readers: list[bool] = []  # which of them know what comes; the first tells the others
        self._announced: dict[OneAhead, dict[str, Any]] = {}
        self._jobs = SimpleQueue[tuple[Callable[[], _Prepared], Future[_Prepared]]]()
        self._under_way: deque[Future[_Prepared]] = deque()
        self._prepared: _Prepared = {}
        self._waited = self._logged = 0.0  # seconds

    def read_ahead(self, iterators: Sequence[RerunDataIterator], group: dist.ProcessGroup) -> None:
        """Read Megatron's data iterators one item ahead; a collective call of the whole job.

        `group` has the ranks that get the same micro-batches; those without an iterator learn of
        them from the first that has one. Consumed samples are counted elsewhere, and what Megatron
        keeps for repeating a step lies around what is changed here.
        """
        if not self._readers:
            limit, purpose = self._shared.config.timeout_seconds, "learn who reads data"
            self._group, self._readers = make_gloo_group(group, limit), [bool(iterators)]
            if self._group is not None:
                self._readers = gather_objects(self._group, purpose, bool(iterators), limit)
            if any(self._readers):
                threading.Thread(target=self._work, name="burst-plans", daemon=True).start()
        for iterator in iterators:
            iterator.iterable = OneAhead(iterator.iterable, self._announce)

    def plan_next(self, read: Read) -> None:
        """Prepare what has been announced, in the thread; all ranks of the group call it together.

        `read` makes documents of what says where they are.
        """
        if any(self._readers):
            # The kinds of calls are found here, where all ranks have the same.
            items, kinds = [*self._announced.values()], self._shared.kinds()
            self._under_way.append(Future())
            job = functools.partial(self._prepare, items, read, kinds)
            self._jobs.put((job, self._under_way[-1]))
            self._announced.clear()

    def documents_of(self, packed: PackedSeqParams, read: Read) -> PackedDocuments:
        """Return the documents of a micro-batch that comes now; attention finds its plans.

        Raises:
            ValueError: as `read` does, or the ranks have different documents.
            CommunicationError: a rank did not say what documents it has.
        """
        while self._under_way:
            self._prepared |= self._wait(self._under_way[0])
            self._under_way.popleft()
        for digest in [*self._prepared][:-_KEPT]:
            del self._prepared[digest]
        found = self._prepared.get(digest_of(packed))
        if found is None:
            return read(packed)
        documents, planned = found.result()
        for context, plans in planned:
            adopt(context, plans)
        return with_tensors(documents, packed)

    def packed(self, item: Mapping[str, Any]) -> PackedSeqParams:
        """Say of a micro-batch, one sequence, what Megatron's scripts say of it to the model."""
        bounds, padded = (
            None if (x := item.get(name)) is None else x.squeeze(0)
            for name in ("cu_seqlens", "cu_seqlens_padded")
        )
        bounds = bounds if padded is None else padded
        return PackedSeqParams(
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            tokens_per_sample=self._tokens_per_sample,
        )

    def _wait(self, job: Future[_Prepared]) -> _Prepared:
        if not job.done():
            begun = time.perf_counter()
            with span("wait for the plan"):
                job.exception()
            self._waited += time.perf_counter() - begun
            if self._waited > 2 * self._logged + 1e-3 and (
                not self._group or self._group.rank() == 0
            ):
                self._logged = self._waited
                logger.info("documents: waited %.0f ms in all for plans", 1e3 * self._waited)
        return job.result()

    def _announce(self, reader: "OneAhead", item: Any) -> None:
        """Note what an iterator gives next."""
        if isinstance(item, dict) and item.get("cu_seqlens") is not None:
            self._announced[reader] = {name: item.get(name) for name in _READ_OF_AN_ITEM}

    def _work(self) -> None:
        failure: Exception | None = None  # for who takes the next micro-batch, and all after it
        while True:
            job, done = self._jobs.get()
            try:
                if failure is not None:
                    raise failure
                done.set_result(job())
            except Exception as error:
                failure = error
                done.set_exception(error)

    def _prepare(
        self, items: list[dict[str, Any]], read: Read, kinds: dict[BurstContext, DocumentCalls]
    ) -> _Prepared:
        """Read and plan what the source has announced; where one rank cannot, none may take it."""
        ours = [self.packed(flatten_batch_for_packed_sequences(item)) for item in items]
        made = {digest_of(packed): self._plan(packed, read, kinds) for packed in self._agree(ours)}
        failure = "; ".join(str(each.exception()) for each in made.values() if each.exception())
        said = self._failures_of_all(failure)
        if said and not failure:
            made = {digest: Future() for digest in made}
            for each in made.values():
                each.set_exception(ValueError(f"documents cannot be prepared: {said}"))
        return made

    def _agree(self, ours: list[PackedSeqParams]) -> list[PackedSeqParams]:
        """Return what the source has announced, which every rank with an iterator must have, too.

        Raises:
            ValueError: one has not.
        """
        if self._group is None:
            return ours
        purpose, reads = "learn what documents come next", self._readers[self._group.rank()]
        theirs = broadcast_object(self._group, purpose, ours, self._readers.index(True), _WHERE)
        said, expected = (", ".join(digest_of(x).hex() for x in each) for each in (ours, theirs))
        if any_rank(self._group, purpose, reads and said != expected, _WHERE):
            what, limit = "the documents of a micro-batch", self._shared.config.timeout_seconds
            said = said if reads else expected
            check_agreement(self._group, what, f"digests {said}", limit, _WHERE)
        return theirs

    def _failures_of_all(self, failure: str) -> str:
        """Return what ranks could not prepare; what they chose is compared in a call.

        Raises:
            CommunicationError: a rank did not come to say.
        """
        purpose = "learn whether the others could plan"
        if self._group is None or not any_rank(self._group, purpose, bool(failure), _WHERE):
            return ""
        limit, ranks = self._shared.config.timeout_seconds, dist.get_process_group_ranks
        texts = gather_objects(self._group, purpose, failure, limit, _WHERE)
        said = zip(ranks(self._group), texts, strict=True)
        return "; ".join(f"rank {rank}: {text}" for rank, text in said if text)

    def _plan(
        self, packed: PackedSeqParams, read: Read, kinds: dict[BurstContext, DocumentCalls]
    ) -> Future[_Planned]:
        planned: Future[_Planned] = Future()
        try:
            documents = read(packed)
            planned.set_result((documents, self._shared.plan_ahead(documents, kinds)))
        except ValueError as error:  # for who takes this one
            planned.set_exception(error)
        return planned


class OneAhead:
    """An iterator that has read the next item when it gives one; errors come in their turn."""

    def __init__(self, items: Iterator[Any], announce: Callable[["OneAhead", Any], None]) -> None:
        self._items, self._announce = items, announce
        self._read: list[Future[Any]] = []  # an item, or what was raised in its place

    def __iter__(self) -> "OneAhead":
        return self

    def __next__(self) -> Any:
        """Return the next item, and announce the one after it."""
        item = self._read.pop().result() if self._read else next(self._items)
        following: Future[Any] = Future()
        try:
            following.set_result(next(self._items))
        except Exception as error:  # StopIteration, too
            following.set_exception(error)
        else:
            self._announce(self, following.result())
        self._read.append(following)
        return item


class DataIterators:
    """Megatron's `build_train_valid_test_data_iterators`, a collective call of the whole job."""

    ahead: Ahead | None = None  # who is to know what they will bring
    unattached: str | None = None  # why the model is not what was asked for

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return the iterators for training, validation and test.

        Raises:
            ValueError: the model, which is built by now, has nothing of what was asked for.
        """
        if self.unattached:
            raise ValueError(self.unattached)
        built = self.original(*args, **options)
        if self.ahead is not None:
            lists = [each if isinstance(each, list) else [each] for each in built]
            found = [x for each in lists for x in each if isinstance(x, RerunDataIterator)]
            group = parallel_state.get_tensor_and_context_parallel_group()
            self.ahead.read_ahead(found, group)
        return built
