"""The script that builds TransformerEngine: what it lacks, and that it goes on. (fast tier)"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/build_transformer_engine.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_transformer_engine", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_says_all_that_is_missing(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, "--directory", str(tmp_path / "made")])
    with pytest.raises(SystemExit) as end:
        script.main()
    for part in ("no g++ on PATH", "no headers of", "torch is built for CUDA None"):
        assert part in str(end.value)
    assert not (tmp_path / "made").exists()


def test_what_is_compiled_is_not_compiled_again(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "csrc/extensions").mkdir(parents=True)
    for name in ("common.cpp", "extensions/bias.cpp"):
        (tmp_path / "csrc" / name).touch()
    made = []

    def run(command: list[str]) -> None:
        if len(made) == 2:
            raise SystemExit("interrupted")
        made.append(Path(command[-1]))
        made[-1].touch()

    monkeypatch.setattr(script, "run", run)
    with pytest.raises(SystemExit):
        script.compile_all(tmp_path, tmp_path, [])
    names = ["unfinished_all.h.gch", "unfinished_common.cpp.o"]
    assert [path.name for path in made] == names and not any(path.exists() for path in made)
    made.clear()
    objects = script.compile_all(tmp_path, tmp_path, [])
    assert [path.name for path in made] == ["unfinished_extensions_bias.cpp.o"]
    assert [path.name for path in objects] == ["common.cpp.o", "extensions_bias.cpp.o"]
    assert all(path.exists() for path in objects)


def test_the_version_is_that_of_the_extra(script: ModuleType) -> None:
    numbers = script.pinned_version().split(".")
    assert len(numbers) == 3 and all(number.isdigit() for number in numbers)
