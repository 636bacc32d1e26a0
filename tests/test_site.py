"""The site of the pages is built, every link and anchor leading somewhere. (fast tier)"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not importlib.util.find_spec("material"), reason="extra `site`")
def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    config = ROOT / "scripts" / "docs" / "mkdocs.yml"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
    done = subprocess.run([*command, "-d", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "install" / "index.html").read_text()
    assert 'docker/README.md"' not in text, "a link to no page of the site"
    assert (tmp_path / "design" / "rings" / "index.html").is_file()
