"""What several tools' tests share."""

from collections.abc import Callable, Sequence

import pytest

from megatron_burst.tools.command import main
from tests.training.preloaded import once_a_class

type Printed = Callable[..., str]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Runs a command line of `megatron-burst` and returns its output; of one that fails, errors."""

    def of(words: str | Sequence[str], status: int = 0) -> str:
        try:
            found = main(words.split() if isinstance(words, str) else [*words])
        except SystemExit as end:
            found = end.code
        shown = capsys.readouterr()
        assert found == status, shown
        return shown.err if status else shown.out

    return of


@pytest.fixture
def detached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what the doctor attaches."""
    arguments = pytest.importorskip("megatron.training.arguments")
    import megatron.training.argument_utils as argument_utils
    import megatron.training.models.gpt as gpt

    monkeypatch.setattr(arguments, "parse_args", arguments.parse_args)
    for name in ("gpt_config_from_args", "hybrid_config_from_args"):
        monkeypatch.setattr(argument_utils, name, getattr(argument_utils, name))
    monkeypatch.setattr(gpt, "mtp_block_spec", gpt.mtp_block_spec)
    group, name = argument_utils.ArgumentGroupFactory, "_get_field_docstrings"
    monkeypatch.setattr(group, name, once_a_class(getattr(group, name)))


@pytest.fixture
def megatron(detached: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Megatron take context parallelism, and put back what the doctor attaches."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
