"""What the site does with links to files of the repository that are no pages (a hook of mkdocs)."""

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Make them links to `repo_url`, or where none is configured the paths as text."""

    def outside(found: re.Match[str]) -> str:
        folder = posixpath.dirname(f"docs/{page.file.src_uri}")
        path = posixpath.normpath(posixpath.join(folder, found[2]))
        if path.startswith("docs/"):
            return found[0]
        repository = config["repo_url"]
        return f"[{found[1]}]({repository}/blob/HEAD/{path})" if repository else found[1]

    return re.sub(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#]+)\)", outside, markdown)
