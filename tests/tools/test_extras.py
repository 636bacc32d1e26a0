"""A tool without an optional package ends in one line. (fast tier)"""

import pytest

from megatron_burst.tools.extras import extra


def test_a_command_says_in_one_line_what_to_install() -> None:
    with pytest.raises(SystemExit) as ended, extra("train,plot", "__main__"):
        raise ModuleNotFoundError("No module named 'megatron'", name="megatron.core")
    assert ended.value.code == (
        "megatron_burst: megatron is not installed: pip install 'megatron-core==0.19.*', or all "
        "that this needs: megatron-burst[train,plot]"
    )


@pytest.mark.parametrize(
    ("module", "name"), [("megatron_burst.tools.trace", "rich"), ("__main__", "megatron_burst.x")]
)
def test_a_library_and_our_own_faults_get_the_error(module: str, name: str) -> None:
    with pytest.raises(ModuleNotFoundError), extra("plot", module):
        raise ModuleNotFoundError(name=name)
