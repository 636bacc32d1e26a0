"""Windows, documents and block masks in our core attention, layer by layer. (fast tier)

Against dense float64 attention on one rank; tests/attention has the rings, tests/training the rest.
"""

from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from megatron_burst import BurstConfig
from megatron_burst.plans.visibility.layout import zigzag_of_each
from tests import oracle
from tests.workers import Team, WorkerPool

pytest.importorskip("megatron.training.models.gpt")
from megatron.core.models.common.embeddings.rope_utils import (  # noqa: E402
    _get_thd_freqs_on_this_cp_rank,
)
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402

from megatron_burst.cpu_platform.table import thd_get_partitioned_indices  # noqa: E402
from megatron_burst.plugin.attention import documents as documents_module  # noqa: E402
from megatron_burst.plugin.attention.block_mask import load_block_mask  # noqa: E402
from megatron_burst.plugin.attention.documents import (  # noqa: E402
    PackedDocuments,
    Reader,
    read_documents,
)
from megatron_burst.plugin.attention.shared_state import SharedState  # noqa: E402
from tests.plugin.test_layer_spec import build, inputs  # noqa: E402

TOKENS = 24
TABLE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]).bool()


def documents(*bounds: int, samples: int = 1) -> PackedDocuments:
    return PackedDocuments(qkv_format="sbhd", bounds=bounds, samples=samples)


def check(module: Any, visible: Tensor, **options: Any) -> None:
    """Output and gradients of a call equal those of dense attention where `visible`."""
    *qkv, dout = inputs(TOKENS)
    q, k, v = (x.requires_grad_() for x in qkv)
    out = module(q, k, v, None, **options)
    out.backward(dout.flatten(2))
    dense = [x.detach().transpose(0, 1) for x in (q, k, v, dout)]
    expected = oracle.attention(*dense, visible)
    found = (out.unflatten(2, (4, 8)), q.grad, k.grad, v.grad)
    for x, y in zip(found, (expected.out, expected.dq, expected.dk, expected.dv), strict=True):
        # Where every query sees itself alone the gradients of Q and K are 0.
        assert (x.transpose(0, 1) - y).norm() < 3e-6 * max(y.norm(), 1.0)


@pytest.mark.parametrize("size", [(0, 0), (1, 0), (5, 0), (5, -1), (100, 0), (-1, 0), (-1, -1)])
def test_a_window_is_megatrons(size: tuple[int, int]) -> None:
    window = None if size[0] == -1 else size[0]
    check(
        build(config={"window_size": size}),
        oracle.visible_pairs(TOKENS, True, window=window),
        attn_mask_type=AttnMaskType.causal,
    )


@pytest.mark.parametrize(("right", "causal"), [(0, True), (-1, False)])
def test_a_window_without_causality(right: int, causal: bool) -> None:
    """Of two layers without a causal mask, a right window of 0 is what makes one causal."""
    module = build(config={"window_size": (3, right)}, attn_mask_type=AttnMaskType.no_mask)
    check(module, oracle.visible_pairs(TOKENS, causal, window=3))


@pytest.mark.parametrize(
    ("frequency", "windowed"), [(None, [1, 2, 3, 4]), (2, [1, 3]), ([1, 1, 1, 0], [1, 2, 3])]
)
def test_window_layers_are_not_run_as_full_attention_accelerate_4177(
    frequency: Any, windowed: list[int]
) -> None:
    """Layers with and without a window follow --window-attn-skip-freq, by their global number."""
    settings = {"window_size": (5, 0), "window_attn_skip_freq": frequency}
    for layer in (1, 2, 3, 4):
        window = 5 if layer in windowed else None
        check(
            build(config=settings, layer_number=layer),
            oracle.visible_pairs(TOKENS, True, window=window),
        )


@pytest.mark.parametrize("bounds", [(0, 24), (0, 1, 2, 23, 24), (0, 7, 19, 24)])
@pytest.mark.parametrize("window", [None, 4])
def test_a_document_sees_itself_alone(bounds: tuple[int, ...], window: int | None) -> None:
    module = build(config={"window_size": None if window is None else (window, 0)})
    visible = oracle.visible_pairs(TOKENS, True, window=window, documents=bounds)
    check(module, visible, packed_seq_params=documents(*bounds))


def masked_pool(tmp_path: Path) -> SharedState:
    file = tmp_path / "blocks.npy"
    numpy.save(file, TABLE.numpy())
    return SharedState(BurstConfig(block_mask=str(file)))


def test_a_block_mask_with_a_window_and_documents(tmp_path: Path) -> None:
    shared = masked_pool(tmp_path)
    check(build(shared=shared), oracle.visible_pairs(TOKENS, True, table=TABLE))
    module = build(shared=shared, config={"window_size": (9, 0)})
    visible = oracle.visible_pairs(TOKENS, True, window=9, documents=(0, 13, 24), table=TABLE)
    check(module, visible, packed_seq_params=documents(0, 13, 24))


def test_every_sample_of_a_flattened_micro_batch_has_the_block_mask(tmp_path: Path) -> None:
    one = oracle.visible_pairs(12, True, table=TABLE)
    both = torch.block_diag(one, one).bool()
    module = build(shared=masked_pool(tmp_path))
    check(module, both, packed_seq_params=documents(0, 12, 24, samples=2))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (numpy.ones((2, 3), dtype=bool), r"a square table of booleans, .* got \(2, 3\) of torch.b"),
        (numpy.ones((2, 2)), r"a square table of booleans, .* got \(2, 2\) of torch.float64"),
        (numpy.array([[{}]]), ""),
        *((content.ljust(128), "") for content in (b"text", b"PK\3\4", b"\x93NUMPY\1\0v\0{\x1c")),
        (b"", ""),
        (None, ""),
    ],
)
def test_a_file_that_holds_no_block_mask(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "blocks.npy"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        numpy.save(file, content)
    with pytest.raises(ValueError, match=f"--burst-block-mask {file}: .*{message}"):
        load_block_mask(str(file))


def _compare(team: Team, directory: str, files: int) -> str:
    shared = SharedState(BurstConfig(block_mask=f"{directory}/{team.rank % files}.npy"))
    try:
        shared.masks.compare(shared.config.timeout_seconds)
    except ValueError as error:
        return str(error)
    return ""


def test_every_rank_of_the_job_has_the_same_block_mask(workers: WorkerPool, tmp_path: Path) -> None:
    """The configuration of a context-parallel group names the same file, which may differ."""
    for number, table in enumerate((TABLE, ~TABLE)):
        numpy.save(tmp_path / f"{number}.npy", table.numpy())
    assert set(workers.run(8, _compare, str(tmp_path), 1)) == {""}
    for text in workers.run(8, _compare, str(tmp_path), 2):
        assert "disagree on the contents of --burst-block-mask" in text


# From Megatron's boundaries to ours.


def packed(*bounds: int, **more: Any) -> PackedSeqParams:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    more = {n: torch.tensor(x) if isinstance(x, list) else x for n, x in more.items()}
    return PackedSeqParams("thd", **{"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": None} | more)


def test_boundaries_lose_what_the_data_set_fills_them_up_with() -> None:
    found = read_documents(packed(0, 3, 8, 8, 8), None, 2)
    assert found.bounds == (0, 3, 8) and found.samples == 1 and found.lengths is None
    assert found.qkv_format != "thd", "Megatron would squeeze tensors and rotate per document"
    found = read_documents(packed(0, 3, 4, 4, cu_seqlens_q_padded=[0, 4, 8, 8]), None, 2)
    assert found.bounds == (0, 4, 8) and found.lengths == (3, 1)
    assert found.cu_seqlens_q.tolist() == [0, 4, 8, 8], "by which Megatron moves MTP's tokens"


def test_the_samples_of_a_flattened_micro_batch_are_counted() -> None:
    found = read_documents(packed(0, 3, 8, 16, tokens_per_sample=8), None, 2)
    assert found.samples == 2 and found.tokens_per_sample is None
    assert read_documents(packed(0, 8, 16, tokens_per_sample=8), None, 1).tokens_per_sample == 8


OTHER = "self-attention has one of them"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (PackedSeqParams("thd"), "without cu_seqlens_q"),
        (packed(0, 9, tokens_per_sample=8), "end at 9, no multiple of 8 tokens a sample"),
        (packed(1, 8), r"cu_seqlens_q goes from 0 to where .* ends, got \[1, 8\]"),
        (packed(0, 0), r"got \[0, 0\]"),
        (packed(0), r"got \[0\]"),
        (packed(0, 5, 3, 8), "cu_seqlens_q falls from 5 to 3 at document 1"),
        (
            packed(0, 8, cu_seqlens_kv=[0, 4]),
            rf"cu_seqlens_kv is \[0, 4\] and .* \[0, 8\]: {OTHER}",
        ),
        (packed(0, 8, cu_seqlens_kv_padded=[0, 8]), rf"cu_seqlens_q_padded is \[\]: {OTHER}"),
        (packed(0, 8, cu_seqlens_q_padded=[0, 4, 8]), r"vectors of one length, got cu_.* \[3\]"),
        (packed(0, 5, 8, cu_seqlens_q_padded=[0, 4, 8]), "document 0, of 5 tokens .* has 4 by cu_"),
        (
            packed(0, 5, 8, max_seqlen_q=4),
            "document 0, of 5 tokens, is longer than max_seqlen_q = 4",
        ),
    ],
)
def test_packings_that_are_refused(params: PackedSeqParams, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_documents(params, None, 1)


def _split(team: Team) -> list[Any]:
    """Documents by themselves, where they are padded or are said to be; and the whole sequence."""
    layouts = []
    for params, apart in (
        (packed(0, 9, 12, cu_seqlens_q_padded=[0, 12, 16]), False),
        (packed(0, 12, 16), True),
        (packed(0, 12, 16), False),
        (packed(0, 16, cu_seqlens_q_padded=[0, 16]), False),  # as Megatron-RL does
    ):
        found = read_documents(params, team.group, 2, apart=apart)
        assert found.layout is found.brought
        layouts.append(found.layout and found.layout.positions(team.rank).tolist())
    with pytest.raises(ValueError, match="document 1, of 7 tokens, takes 7, no multiple of 2 x 2 "):
        read_documents(packed(0, 8, 15), team.group, 2, apart=True)
    return layouts


def test_each_document_is_in_a_zigzag_of_its_own_if_it_is_padded(workers: WorkerPool) -> None:
    own = [0, 1, 2, 9, 10, 11, 12, 15], [3, 4, 5, 6, 7, 8, 13, 14]
    whole = [0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]
    found = workers.run(2, _split)
    assert found == [[own[rank], own[rank], None, whole[rank]] for rank in (0, 1)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_zigzag_of_each_document_is_that_of_megatrons_rotary_embeddings(ranks: int) -> None:
    """And of the CPU's stand-in for TransformerEngine's function, which splits --sft."""
    lengths = [4 * ranks, 2 * ranks, 6 * ranks]
    bounds = [0, *accumulate(lengths)]
    for rank in range(ranks):
        rows = zip((torch.empty(n // ranks) for n in lengths), bounds, strict=False)
        whole = torch.arange(bounds[-1])
        expected = [_get_thd_freqs_on_this_cp_rank(rank, ranks, x, whole, at) for x, at in rows]
        found = zigzag_of_each(lengths, ranks).positions(rank)
        assert torch.equal(found, torch.cat(expected))
        split = thd_get_partitioned_indices(torch.tensor(bounds), bounds[-1], ranks, rank)
        assert torch.equal(found, split)


def thd(tokens: int, params: PackedSeqParams, module: Any) -> tuple[Tensor, list[Tensor]]:
    """Run one sample of Megatron's [t, heads, d]; return output and gradients, batch first."""
    *qkv, dout = (x[:tokens, 0].contiguous() for x in inputs(tokens))
    qkv = [x.requires_grad_() for x in qkv]
    out = module(*qkv, None, packed_seq_params=params)
    assert out.shape == dout.shape
    out.backward(dout)
    return out[None], [x.grad[None] for x in qkv]


def test_megatrons_thd_and_its_padding() -> None:
    """Rows of padding see nothing and are seen by none; their output and gradients are 0."""
    params = packed(0, 7, 8, 8, 17, cu_seqlens_q_padded=[0, 8, 12, 14, 24])
    out, gradients = thd(TOKENS, params, build())
    visible = oracle.visible_pairs(TOKENS, True, documents=(0, 8, 12, 14, 24), lengths=(7, 1, 0, 9))
    dense = [x[None, :, 0] for x in inputs(TOKENS)]
    expected = oracle.attention(*dense, visible)
    found = oracle.Result(out, expected.lse, *gradients)
    for name in ("out", "dq", "dk", "dv"):
        x, y = getattr(found, name), getattr(expected, name)
        assert oracle.relative_error(x, y) < 3e-6
        assert not x[:, ~visible.any(0)].any()


def test_the_boundaries_are_read_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again where they have changed in place."""
    read = []
    monkeypatch.setattr(documents_module, "read_documents", lambda *x, **_: read.append(x))
    reader, first, second = Reader(), packed(0, 3, 8), packed(0, 3, 8)
    for params in (first, first, second, first):
        reader(params, None)
    assert len(read) == 2
    first.cu_seqlens_q[1] = 4
    second.cu_seqlens_q = torch.tensor([0, 2, 8])
    for params in (first, second, first, second):
        reader(params, None)
    assert len(read) == 4
    with torch.inference_mode():
        reader(packed(0, 3, 8), None)


@pytest.mark.parametrize(
    ("tokens", "samples", "params", "message"),
    [
        (8, 1, packed(0, 3, 6), "documents end at 6, and the 1 context-parallel ranks hold 8"),
        (8, 2, packed(0, 3, 8), "for 2 samples that are not one sequence: pass --micro-batch-s"),
        (8, 1, PackedSeqParams("sbhd"), "cannot be honoured in a ring but with qkv_format thd"),
    ],
)
def test_thd_that_is_refused(
    tokens: int, samples: int, params: PackedSeqParams, message: str
) -> None:
    q, k, v, _ = (x.squeeze(1) for x in (y[:tokens, :samples] for y in inputs(tokens)))
    with pytest.raises(ValueError, match=message):
        build()(q, k, v, None, packed_seq_params=params)
