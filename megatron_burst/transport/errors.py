"""How what fails between ranks is named."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class CommunicationError(RuntimeError):
    """A message failed, took too long, or never came; the text names step, peer and tensor."""


@contextmanager
def named_errors(where: str, what: str) -> Iterator[None]:
    """Say of an error of torch's in the body which rank could not do what, and where."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {dist.get_rank()}, {where}: could not {what}: {error}"
        ) from error
