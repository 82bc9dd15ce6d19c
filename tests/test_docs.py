"""Tests of the documentation: its code runs, its links work, and its messages are dpex's."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from cluster_programs import PROGRAM_SECONDS, ROOT, run_program, workplace

import dpex

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for pattern in ("*.md", "docs/*.md", "examples/*.md", "notebooks/*.md")
    for path in sorted(ROOT.glob(pattern))
}

# Pages whose code uses a dataset of the reader. The code of the other pages is complete.
SKETCHES = {
    "README.md",
    "README.zh-CN.md",
    *(f"docs/{page}.md" for page in ("cluster", "debugging", "do_i_need_it", "memory")),
}
WHAT_THE_READER_HAS = """
import torch
from dpex import DataLoader, DpexDataLoader

dataset = torch.utils.data.TensorDataset(torch.rand(250, 3), torch.arange(250))
"""

FENCE = re.compile(r"^( *```+)(\w*).*?\n(.*?)^\1 *$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


def code_of(page: str) -> list[str]:
    return [code for _, language, code in FENCE.findall(PAGES[page]) if language == "python"]


@pytest.mark.extended
@pytest.mark.multiprocess
@pytest.mark.parametrize("page", [page for page in PAGES if code_of(page)])
def test_the_code_of_a_page_runs(page: str) -> None:
    given = [WHAT_THE_READER_HAS] if page in SKETCHES else []
    with workplace() as place:
        program = place / "page.py"
        program.write_text("\n".join(given + code_of(page)))
        done = run_program(program, place=place, seconds=PROGRAM_SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_was_saved_is_loaded_without_running_code_of_it() -> None:
    suffixes = {".py", ".md", ".ipynb"}
    for folder in ("dpex", "docs", "examples", "notebooks"):
        for path in (p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes):
            for call in re.findall(r"torch\.load\(.*", path.read_text()):
                assert "weights_only=True" in call, path


# --- links ----------------------------------------------------------------------------------------


def anchors_of(page: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    anchors = set()
    seen: Counter[str] = Counter()
    for heading in HEADING.findall(FENCE.sub("", PAGES[page])):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def dead_links(page: str) -> Iterator[str]:
    for link in re.findall(r"\]\(<?([^)\s>]+)", FENCE.sub("", PAGES[page])):
        if re.match(r"[a-z]+:", link):  # on another site
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        name = str(target.resolve().relative_to(ROOT.resolve()))
        # Only GitHub shows a directory as a page.
        if not target.is_file() or (anchor and anchor not in anchors_of(name)):
            yield link


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_file_and_a_heading_of_it(page: str) -> None:
    assert list(dead_links(page)) == []


# --- messages -------------------------------------------------------------------------------------

MESSAGES = re.findall(r"^### `(.+)`$", PAGES["docs/troubleshooting.md"], re.MULTILINE)
ERRORS = {
    page: re.findall(r"`\w+Error: (.+?)`", PAGES[page])
    for page in ("docs/datasets.md", "docs/stages.md")
}
# The page may omit errors about a single argument, which are ValueError or TypeError.
EXPLAINED = {
    *(name for name in dpex.__all__ if name.endswith("Error")),
    *("announce", "announce_once", "logger.warning", "warn", "warn_once", "warnings.warn"),
}


def text_of(node: ast.AST) -> str:
    """Return the text of an expression, with ``...`` in place of each value."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%[-+ #0-9.]*[a-z]", "...", text)
        case ast.JoinedStr(values=parts):
            return "".join(map(text_of, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
    return "..."


def code_nodes() -> Iterator[ast.AST]:
    """Yield the nodes of the package's code, without docstrings."""
    for path in sorted(Path(dpex.__file__).parent.rglob("*.py")):
        pending: list[ast.AST] = [ast.parse(path.read_text())]
        while pending:
            node = pending.pop()
            yield node
            children = ast.iter_child_nodes(node)
            pending += (c for c in children if not (isinstance(c, ast.Expr) and is_text(c.value)))


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_messages_are_dpex_s() -> None:
    texts = "\n".join(text_of(node) for node in code_nodes() if isinstance(node, ast.expr))
    assert MESSAGES
    assert [text for text in MESSAGES if text not in texts] == []
    for page, errors in ERRORS.items():
        assert errors, page
        assert [text for text in errors if text not in texts] == []


def test_what_dpex_warns_of_and_its_own_errors_are_explained() -> None:
    unexplained = []
    for node in code_nodes():
        if isinstance(node, ast.Call) and ast.unparse(node.func) in EXPLAINED:
            text = " ".join(map(text_of, node.args))
            # A variable has no text to compare.
            own = re.search("[a-z]", text.removeprefix("dpex: "))
            if own and not any(message in text for message in MESSAGES):
                unexplained.append(text)
    assert unexplained == []
