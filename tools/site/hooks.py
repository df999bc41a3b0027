"""Hooks of MkDocs: README and CHANGELOG are pages of the site, and links from documents to other
files of the repository lead there."""

from __future__ import annotations

import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Of the root: their places in the site.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Any, config: Any) -> Any:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    here = page.file.src_uri
    folder = "" if here in PAGES.values() else posixpath.join("docs", posixpath.dirname(here))

    def lead(link: re.Match[str]) -> str:
        start, target, anchor, end = link.groups()
        if "://" in target or target.startswith(("mailto:", "/")):
            return link.group(0)
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / path).exists():
            return link.group(0)  # MkDocs reports it
        if path in PAGES or path.startswith("docs/") and (ROOT / path).is_file():
            to = PAGES.get(path, path.removeprefix("docs/"))
            back = posixpath.relpath(to, posixpath.dirname(here) or ".")
            return f"{start}{back}{anchor or ''}{end}"
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{start}{config.repo_url}/{kind}/main/{path}{anchor or ''}{end}"

    return LINK.sub(lead, markdown)
