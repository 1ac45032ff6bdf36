"""Pages of docs/ that are partly made by a program: what it makes stands between two comments."""

from __future__ import annotations

from pathlib import Path


def replace_section(page: Path, mark: str, content: str) -> None:
    """Put ``content`` in place of what stands between ``<!-- mark -->`` and ``<!-- end of mark -->`` of ``page``.

    Raises:
        ValueError: if the page has no such section.
    """
    start, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    before, _, rest = page.read_text().partition(start)
    _, _, after = rest.partition(end)
    if not after:
        raise ValueError(f"{page} has no section {start} ... {end}")
    page.write_text(f"{before}{start}\n\n{content}\n\n{end}{after}")
