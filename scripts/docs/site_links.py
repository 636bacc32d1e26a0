"""What the site does with links to files of the repository that are no pages (a hook of mkdocs)."""

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Make them links to `repo_url`, or where none is configured the paths as text."""

    def outside(link: re.Match[str]) -> str:
        folder = posixpath.dirname(f"docs/{page.file.src_uri}")
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if path.startswith("docs/"):
            return link[0]
        repository = config["repo_url"]
        return f"[{link[1]}]({repository}/blob/HEAD/{path})" if repository else link[1]

    return re.sub(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#]+)\)", outside, markdown)
