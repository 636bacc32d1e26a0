"""Trains with Megatron's --sft on conversations that are made here; run by tests.

Its data set and its tokenizer need packages that are not installed; `SFTDataset` itself is
Megatron's. It pads conversations to eight tokens whatever the number of ranks, so that all train on
the same.
"""

import random
from typing import Any

IGNORED, PAD, EOD = -100, 255, 256


class Conversations:
    """What is read of a file: messages, together longer than a sample or much shorter."""

    def __init__(self, _: str) -> None:
        pass

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> list[dict[str, Any]]:
        draw, messages = random.Random(number), []
        for _ in range(draw.randint(1, 9)):
            for role in ("system", "user", "assistant"):
                content = [draw.randrange(PAD) for _ in range(draw.randint(1, 14))]
                messages.append({"role": role, "content": content})
        return messages


class Tokenizer:
    """Tokens are the messages' numbers; what the assistant says is learned."""

    eod, pad, vocab_size = EOD, PAD, EOD + 1
    unique_identifiers = {"class": "conversations"}

    def tokenize_conversation(self, conversation: list[dict[str, Any]], **_: bool) -> Any:
        import torch

        tokens = [(m["role"], token) for m in conversation for token in m["content"]]
        targets = [token if role == "assistant" else IGNORED for role, token in tokens]
        return torch.tensor([token for _, token in tokens]), torch.tensor(targets)


def main() -> None:
    from megatron.training.datasets import sft_dataset

    from megatron_burst import pretrain_gpt
    from megatron_burst.plugin import pretraining

    def padded_to_eight(args: Any) -> Any:
        config = original(args)
        config.context_parallel_size = 4
        return config

    original = pretraining._dataset_config
    pretraining._dataset_config = padded_to_eight
    pretraining.build_tokenizer = lambda _: Tokenizer()
    sft_dataset.SFTLowLevelDataset = Conversations
    pretrain_gpt.main()
