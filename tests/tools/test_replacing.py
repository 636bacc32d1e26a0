"""Files that others read are replaced as a whole. (fast tier)"""

import os
from pathlib import Path

import pytest

from megatron_burst.tools.replacing import replacing, write_text


def test_a_file_is_replaced_at_the_end_or_not_at_all(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    for path, text in ((file, "one"), (link, "two"), (file, "three")):
        write_text(path, text)
        assert file.read_text() == text and link.is_symlink()
    with file.open() as old, pytest.raises(OSError, match="No space"), replacing(file) as new:
        new.write_text("half")
        assert file.read_text() == "three" and old.read() == "three"
        raise OSError("No space left")
    assert file.read_text() == "three"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_pipe_is_written_to_itself_and_a_directory_is_refused(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    write_text(Path(f"/dev/fd/{writing}"), "text")
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "text"
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "text")
