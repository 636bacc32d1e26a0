"""Prepares a micro-batch in a thread while the model runs the one before it.

Megatron reads a micro-batch when its forward begins; whatever the host does from then on, the
device waits for. So data iterators are read one item ahead, and after a forward, when the device
has enough to do, a thread makes all that the next documents need. What ranks have to tell each
other for it goes by a gloo group of its own.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from megatron_burst.plugin.attention.core_attention import SharedState
from megatron_burst.plugin.attention.documents import Documents, digest_of, with_tensors
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

type Read = Callable[[PackedSeqParams], Documents]
type _Prepared = tuple[Documents, list[tuple[BurstContext, Plans]]]


class Ahead:
    """The micro-batches that are known before they come; all others are planned when they come.

    A micro-batch is found by what it says of its documents. So it does not matter in which order
    micro-batches come, how often, or whether one that was announced ever does.
    """

    def __init__(self, shared: SharedState, tokens_per_sample: int | None = None) -> None:
        self._shared, self._tokens_per_sample = shared, tokens_per_sample
        self._group: dist.ProcessGroup | None = None  # who gets the same micro-batches
        self._readers: list[bool] = []  # which of them know what comes; the first tells the others
        self._announced: dict[OneAhead, dict[str, Any]] = {}
        self._jobs: SimpleQueue[tuple[Any, ...]] = SimpleQueue()  # the thread's
        self._last: Future[None] | None = None
        self._waited = self._logged = 0.0  # seconds
        # The thread's until `_last` is done, then the caller's.
        self._ready: dict[bytes, Future[_Prepared]] = {}

    def watch(self, iterators: Sequence[RerunDataIterator], group: dist.ProcessGroup) -> None:
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

    def begin(self, read: Read) -> None:
        """Prepare what has been announced, in the thread; all ranks of the group call it together.

        `read` makes documents of what says where they are.
        """
        if any(self._readers):
            before, self._last = self._last, Future()
            kinds = self._shared.kinds()  # here, where all ranks have the same
            self._jobs.put(([*self._announced.values()], read, kinds, before, self._last))
            self._announced.clear()

    def take(self, packed: PackedSeqParams, read: Read) -> Documents:
        """Return the documents of a micro-batch that comes now; attention finds its plans.

        Raises:
            ValueError: as `read` does, or the ranks have different documents.
            CommunicationError: a rank did not say what documents it has.
        """
        if self._last is None:
            return read(packed)
        self._wait(self._last)
        found = self._ready.get(digest_of(packed))
        if found is None:
            return read(packed)
        documents, planned = found.result()
        for context, plans in planned:
            adopt(context, plans)
        return with_tensors(documents, packed)

    def _wait(self, last: Future[None]) -> None:
        if not last.done():
            begun = time.perf_counter()
            with span("wait for the plan"):
                last.exception()
            self._waited += time.perf_counter() - begun
            if self._waited > 2 * self._logged + 1e-3 and (
                not self._group or self._group.rank() == 0
            ):
                self._logged = self._waited
                logger.info("documents: waited %.0f ms in all for plans", 1e3 * self._waited)
        last.result()

    def _announce(self, reader: "OneAhead", item: Any) -> None:
        """Note what an iterator gives next."""
        if isinstance(item, dict) and item.get("cu_seqlens") is not None:
            self._announced[reader] = {name: item.get(name) for name in _READ_OF_AN_ITEM}

    def _work(self) -> None:
        while True:
            items, read, kinds, before, done = self._jobs.get()
            try:
                if before is not None:
                    before.result()
                made = self._agree([self._packed(item) for item in items])
                failures = [self._prepare(packed, read, kinds) for packed in made]
                self._share("; ".join(filter(None, failures)), made)
                done.set_result(None)
            except Exception as error:  # for who takes the next micro-batch, and all after it
                done.set_exception(error)

    def _packed(self, item: dict[str, Any]) -> PackedSeqParams:
        """Say of a micro-batch on the host what Megatron's scripts say of it on the device."""
        item = flatten_batch_for_packed_sequences(item)
        bounds, padded = (
            None if (x := item[name]) is None else x.squeeze(0)
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

    def _share(self, failure: str, made: list[PackedSeqParams]) -> None:
        """Let no rank take what another could not prepare; what they chose is compared in a call.

        Raises:
            CommunicationError: a rank did not come to say.
        """
        purpose = "learn whether the others could plan"
        if self._group is None or not any_rank(self._group, purpose, bool(failure), _WHERE):
            return
        limit, ranks = self._shared.config.timeout_seconds, dist.get_process_group_ranks
        texts = gather_objects(self._group, purpose, failure, limit, _WHERE)
        said = [f"rank {r}: {t}" for r, t in zip(ranks(self._group), texts, strict=True) if t]
        for packed in made if not failure else ():
            failed: Future[_Prepared] = Future()
            failed.set_exception(ValueError(f"documents cannot be prepared: {'; '.join(said)}"))
            self._ready[digest_of(packed)] = failed

    def _prepare(
        self, packed: PackedSeqParams, read: Read, kinds: dict[BurstContext, DocumentCalls]
    ) -> str:
        """Return why it could not, if so."""
        if (digest := digest_of(packed)) in self._ready:
            return ""
        prepared: Future[_Prepared] = Future()
        try:
            documents = read(packed)
            prepared.set_result((documents, self._shared.plan_ahead(documents, kinds)))
        except ValueError as error:  # for who takes this one
            prepared.set_exception(error)
        self._ready[digest] = prepared
        if len(self._ready) > _KEPT:
            del self._ready[next(iter(self._ready))]
        return str(prepared.exception() or "")


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
            self.ahead.watch(found, group)
        return built
