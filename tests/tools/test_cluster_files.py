"""Cluster files that cannot be meant are refused in one line. (fast tier)"""

from pathlib import Path

import pytest

from megatron_burst.tools.plan.configs import Configs
from tests.tools.conftest import Printed

WHOLE = """
base = "h100"
gpus_per_node = 4
[mine.rates]
nic_gb_s = [25, "measured", "by hand"]
within_us = 0
"""
ASKED = "--model llama3_8b --gpus 8 --seq-length 65536 --fractions 1".split()


def refusal(file: Path, text: str | bytes, printed: Printed) -> str:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    said = printed(["plan", "--cluster", str(file), *ASKED], 1)
    assert said.startswith("megatron-burst plan: ") and said.count("\n") == 1, said
    return said


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"h100"', '"mine"', "the bases of mine -> mine lead back to it"),
        ('"h100"', '"nowhere"', "mine -> nowhere is no table"),
        ('"h100"', "3", "mine -> 3 is no table"),
        ("= 4", "= 0", "gpus_per_node = 0 is not a positive number"),
        ("= 4", "= 2.5", "gpus_per_node = 2.5 is not a whole number"),
        ("= 4", '= "8"', "gpus_per_node = '8' is not a whole number"),
        ("= 4", "= true", "gpus_per_node = True is not a positive number"),
        ("gpus_per_node", "memory_gib = nan #", "memory_gib = nan is not a positive number"),
        ("gpus_per_node", "peak_tflops = inf #", "peak_tflops = inf is not a positive number"),
        ("gpus_per_node", "gpus_a_node", "an unknown gpus_a_node; known are gpus_per_node, nics"),
        ("25", "0", "rate nic_gb_s = 0 is not a positive number"),
        ("25", '"fast"', "rate nic_gb_s = 'fast': no such constant"),
        ('[25, "measured", "by hand"]', "[]", "rate nic_gb_s = [] is not a positive number"),
        ("within_us = 0", "within_us = -1", "rate within_us = -1 is not a number from 0 on"),
        ("within_us", "within_ms", "an unknown rate within_ms; known are forward_tflops"),
        ("[mine.rates]", "rates = 3\n[other]", "rates = 3 of mine is no table"),
        ("[mine]", "mine = 3 #", "is no TOML"),
        ("[mine]", "[yours]", "cluster mine has no gpus_per_node, nics_per_node, memory_gib"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, printed: Printed, old: str, new: str, message: str
) -> None:
    file, whole = tmp_path / "mine.toml", f"[mine]{WHOLE}"
    file.write_text(whole)
    assert Configs.read().cluster(str(file)).nic_rate == 25e9
    assert whole.count(old)
    assert message in refusal(file, whole.replace(old, new, 1), printed)


@pytest.mark.parametrize("text", [b"\xff", b"\0", b"x"])
def test_what_is_no_toml_is_named(tmp_path: Path, printed: Printed, text: bytes) -> None:
    file = tmp_path / "mine.toml"
    assert f"{file} is no TOML: " in refusal(file, text, printed)
