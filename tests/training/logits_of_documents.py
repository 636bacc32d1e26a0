"""A GPT of our layer spec on documents that the caller packs and splits, as RL does; run by tests.

Prints how far logits and gradients over the ranks are from those of each document alone.
"""

import copy
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Real tokens, and places with padding: multiples of 8, so for up to four ranks.
LENGTHS = [[9, 8, 1, 27, 0, 16], [40, 30]]
PLACES = [[16, 8, 8, 32, 8, 16], [40, 48]]
ROWS, SIZE = 64, 32
SHARED = {
    "num_layers": 2,
    "hidden_size": SIZE,
    "num_attention_heads": 4,
    "use_cpu_initialization": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
    "rope_type": "rope",
    "apply_rope_fusion": False,
}


def start() -> tuple[Any, Any]:
    """Start Megatron; return its groups, and the same with this rank alone for a sequence."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import arguments, initialize

    arguments.parse_and_validate_args()
    initialize.initialize_megatron(allow_no_cuda=True)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    alone = copy.copy(groups)
    alone.cp = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return groups, alone


def main() -> None:
    groups, alone = start()
    for name in ("gqa", "latent"):
        ours, reference = build(name, groups), build(name, alone)
        reference.load_state_dict(ours.state_dict())
        for kind, apart in compare(ours, reference, groups.cp).items():
            if dist.get_rank() == 0:
                print(f"apart {name} {kind} {apart}")


def build(name: str, groups: Any, shared: Any = None) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from megatron_burst import BurstConfig
    from megatron_burst.plugin.layer_spec import burst_layer_spec

    ranks, is_mla = groups.cp.size(), name == "latent"
    make = MLATransformerConfig if is_mla else TransformerConfig
    more = LATENT if is_mla else {"num_query_groups": 2}
    config = make(**SHARED, **more, context_parallel_size=ranks)
    spec = get_gpt_layer_local_spec(multi_latent_attention=is_mla)
    return GPTModel(
        config,
        burst_layer_spec(spec, shared or BurstConfig()),
        vocab_size=ROWS,
        max_sequence_length=128,
        position_embedding_type="rope",
        pg_collection=groups,
    )


def compare(ours: Any, reference: Any, group: dist.ProcessGroup) -> dict[str, float]:
    """Two micro-batches under way at once, whose backwards run in their order."""
    found = [Packed(ours, number, group) for number in range(len(LENGTHS))]
    with torch.no_grad():
        again = Packed(ours, 0, group).logits
    sum(packed.loss for packed in found).backward()
    expected = [
        [Alone(reference, *cut) for cut in documents(seed, lengths)]
        for seed, lengths in enumerate(LENGTHS)
    ]
    sum(one.loss for some in expected for one in some).backward()
    apart = {"again": float((again - found[0].logits).abs().max()), "logits": 0.0, "inputs": 0.0}
    for packed, some in zip(found, expected, strict=True):
        for name in ("logits", "inputs"):
            whole = torch.cat([getattr(one, name)[: len(one.weights)] for one in some])
            rows = packed.whole(getattr(packed, name))
            apart[name] = max(apart[name], distance(rows, whole))
    weights = zip(ours.parameters(), reference.parameters(), strict=True)
    for mine, theirs in weights:
        dist.all_reduce(mine.grad, group=group)
        apart["weights"] = max(apart.get("weights", 0.0), distance(mine.grad, theirs.grad))
    return apart


def documents(seed: int, lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """The tokens of each document of a micro-batch, and the gradients of its logits."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, ROWS, (length,), generator=generator),
            torch.randn(length, ROWS, generator=generator),
        )
        for length in lengths
    ]


def in_thd(lengths: list[int], places: list[int], **more: Any) -> Any:
    """Megatron's words for padded documents, or for such as need no padding."""
    from megatron.core.packed_seq_params import PackedSeqParams

    real, padded = (
        torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in (lengths, places)
    )
    padded = None if lengths == places else padded
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=max(places),
        max_seqlen_kv=max(places),
        **more,
    )


class Run:
    """A forward, whose inputs, the embeddings [tokens, size], keep their gradient."""

    def run(self, model: Any, tokens: Tensor, packed: Any) -> Tensor:
        hook = model.embedding.register_forward_hook(self._keep)
        positions = torch.arange(tokens.shape[1])[None]
        logits = model(tokens, positions, None, packed_seq_params=packed)
        hook.remove()
        return logits[0]

    def _keep(self, _: Any, __: Any, output: Tensor) -> None:
        self._embedded = output
        if output.requires_grad:
            output.retain_grad()

    @property
    def inputs(self) -> Tensor:
        return self._embedded.grad[:, 0]


class Alone(Run):
    """One document as a sequence of its own, an even one for our zigzag; the last token is unseen.

    None of its logits are made if it has no tokens.
    """

    def __init__(self, model: Any, tokens: Tensor, weights: Tensor) -> None:
        self.weights = self.logits = weights
        self._embedded = torch.zeros(0, 1, SIZE, requires_grad=True)
        self._embedded.grad = torch.zeros(0, 1, SIZE)
        if len(tokens):
            even = torch.cat([tokens, tokens[: len(tokens) % 2]])
            self.logits = self.run(model, even[None], None)[: len(tokens)]
        self.loss = (self.logits * weights).sum()


class Packed(Run):
    """A micro-batch in the caller's hands: each document padded, in a zigzag of its own."""

    def __init__(self, model: Any, number: int, group: dist.ProcessGroup) -> None:
        self._group, self._number = group, number
        cut = documents(number, LENGTHS[number])
        tokens, weights = (self._mine([pair[i] for pair in cut]) for i in range(2))
        self.logits = self.run(model, tokens[None], in_thd(LENGTHS[number], PLACES[number]))
        self.loss = (self.logits * weights).sum()

    def _mine(self, rows: list[Tensor]) -> Tensor:
        parts = []
        for each, place in zip(rows, PLACES[self._number], strict=True):
            padding = each.new_zeros(place - len(each), *each.shape[1:])
            chunks = torch.cat([each, padding]).chunk(2 * self._group.size())
            parts += [chunks[self._group.rank()], chunks[-1 - self._group.rank()]]
        return torch.cat(parts)

    def whole(self, mine: Tensor) -> Tensor:
        """The rows of all ranks in the order of the documents, without padding."""
        mine, ranks = mine.detach().contiguous(), self._group.size()
        shards = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(shards, mine, group=self._group)
        lengths = [place // ranks for place in PLACES[self._number]]
        rows = []
        for length, *cut in zip(
            LENGTHS[self._number], *(shard.split(lengths) for shard in shards), strict=True
        ):
            first, last = zip(*(part.chunk(2) for part in cut), strict=True)
            rows.append(torch.cat([*first, *reversed(last)])[:length])
        return torch.cat(rows)


def distance(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm() / expected.norm()).nan_to_num(torch.inf))
