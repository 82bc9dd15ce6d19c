"""Tables in pages, for the runs that are too long for tests."""

from __future__ import annotations

from pathlib import Path

__all__ = ["put_between"]


def put_between(name: str, text: str, page: Path) -> None:
    """Replace what stands between two markers, ``<!-- name: begin -->`` and its end."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
