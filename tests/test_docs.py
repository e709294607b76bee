"""Tests of the documentation: code blocks, named paths, links, configs, changelog.

Every fenced ``python`` block of README.md and docs/*.md is a script of its own and runs in an empty
directory. A block of the README runs in a new process, as a reader would start it. Other blocks run
as under torchrun: on ranks of the pool, which are running already. A block that cannot run here
carries ``<!-- no-test: reason -->`` on the line above its fence.
"""

from __future__ import annotations

import re
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.support.rank_environment import set_torchrun_variables
from tests.support.rank_pool import RankContext, RankPool
from tests.support.scripts import RunScript

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("**/*.md"),
    ]
)
CONFIGS = sorted(
    path for pattern in ("*.yaml", "*.yml") for path in (ROOT / "examples/configs").glob(pattern)
)
SHELL_LANGUAGES = {"console", "bash", "sh", "shell"}
# A block may launch a few ranks, each of which imports torch: about 15 s. Less than the timeout of
# one test.
DEADLINE_SECONDS = 200

_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<info>.*)$")
_NO_TEST = re.compile(r"^<!--\s*no-test:\s*(?P<reason>.*?)\s*-->$")
_NAMED_PATH = re.compile(r"(?<![\w/.-])(?:\./)?((?:examples|docs)/[\w./-]*\w)")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"^\s{0,3}\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block: where its code starts, its language and why it may not run."""

    page: Path
    line: int
    language: str
    code: str
    no_test: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def split_page(page: Path) -> tuple[list[Block], str]:
    """Return the fenced blocks of a page, and its text without them (same number of lines)."""
    blocks: list[Block] = []
    prose: list[str] = []
    body: list[str] | None = None
    fence = language = ""
    indent = start = 0
    no_test: str | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        match = _FENCE.match(line)
        if body is None:
            if match is None:
                prose.append(line)
                continue
            fence, indent, start, body = match["marks"], len(match["indent"]), number + 1, []
            language = (match["info"].split() or [""])[0].lower()
            above = _NO_TEST.match(prose[-1].strip()) if prose else None
            no_test = above["reason"] if above else None
        elif match and match["marks"].startswith(fence) and not match["info"].strip():
            blocks.append(Block(page, start, language, "\n".join(body) + "\n", no_test))
            body = None
        else:
            body.append(line[min(indent, len(line) - len(line.lstrip(" "))) :])
        prose.append("")
    assert body is None, f"{page.relative_to(ROOT)}:{start - 1}: this fence is never closed"
    return blocks, "\n".join(prose)


def anchors(page: Path) -> set[str]:
    """Return the anchors that a Markdown renderer gives to the headings of a page."""
    names: set[str] = set()
    for heading in _HEADING.findall(split_page(page)[1]):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        name, count = slug, 0
        while name in names:
            count += 1
            name = f"{slug}-{count}"
        names.add(name)
    return names


BLOCKS = [block for page in PAGES for block in split_page(page)[0]]
PYTHON_BLOCKS = [block for block in BLOCKS if block.language in {"python", "py"}]
README_BLOCKS = [block for block in PYTHON_BLOCKS if block.page.name == "README.md"]
DOCS_BLOCKS = [block for block in PYTHON_BLOCKS if block not in README_BLOCKS]
SHELL_BLOCKS = [block for block in BLOCKS if block.language in SHELL_LANGUAGES]


def skip_if_it_cannot_run(block: Block) -> None:
    if block.no_test is not None:
        assert block.no_test, f"{block}: `no-test` needs a reason"
        pytest.skip(block.no_test)


def write_script(block: Block, directory: Path) -> Path:
    """Write a block to a file, with blank lines first: line numbers in a traceback are those of the
    page."""
    script = directory / "script.py"
    script.write_text("\n" * (block.line - 1) + block.code, encoding="utf-8")
    return script


def run_under_torchrun(context: RankContext, script: str) -> None:
    """Run a script on one of the ranks that torchrun would have started."""
    set_torchrun_variables(context)
    runpy.run_path(script, run_name="__main__")


@pytest.mark.parametrize("block", README_BLOCKS, ids=str)
def test_block_of_the_readme_runs(block: Block, run_script: RunScript, tmp_path: Path) -> None:
    skip_if_it_cannot_run(block)
    empty = tmp_path / "empty"
    empty.mkdir()
    result = run_script(write_script(block, tmp_path), cwd=empty, timeout=DEADLINE_SECONDS)
    assert result.returncode == 0, f"{block} exited with {result.returncode}:\n{result.output}"


@pytest.mark.parametrize("block", DOCS_BLOCKS, ids=str)
def test_block_of_a_page_runs(block: Block, pool: RankPool, tmp_path: Path) -> None:
    skip_if_it_cannot_run(block)
    ranks = max(map(int, re.findall(r"\bdevices=(\d+)", block.code)), default=1)
    script = str(write_script(block, tmp_path))
    pool.run(run_under_torchrun, ranks, script, timeout=DEADLINE_SECONDS)


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=str)
def test_paths_in_shell_block_exist(block: Block) -> None:
    missing = [name for name in _NAMED_PATH.findall(block.code) if not (ROOT / name).exists()]
    assert not missing, f"{block} names files that do not exist: {missing}"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_config_is_a_yaml_mapping(config: Path) -> None:
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    assert isinstance(content, dict), f"{config.name}: expected a mapping, got {type(content)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_internal_links_resolve(page: Path) -> None:
    prose = re.sub(r"(`+)(?:(?!\1).)+?\1", "", split_page(page)[1])  # inline code holds no links
    broken = []
    for link in _LINK.findall(prose) + _REFERENCE.findall(prose):
        if re.match(r"[a-z][a-z0-9+.-]*:", link, re.IGNORECASE):
            continue  # another site
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        inside = target.is_relative_to(ROOT) and target.exists()
        if not inside or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken, f"{page.relative_to(ROOT)}: these links lead nowhere: {broken}"


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", ROOT / "docs/methods.md"], ids=str)
def test_named_files_exist(page: Path) -> None:
    folders = (ROOT, ROOT / "lightning_dlres", ROOT / "tests")
    names = re.findall(r"`([\w./]+(?:\.py|/))`", page.read_text())
    assert names
    missing = [name for name in names if not any((folder / name).exists() for folder in folders)]
    # Names such as `my_codec.py` are placeholders: readers choose their own.
    missing = [name for name in missing if "my_" not in name]
    assert not missing, f"{page.relative_to(ROOT)} names missing paths: {missing}"


def test_changelog_has_an_unreleased_section_with_entries() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    match = re.search(r"^## \[Unreleased\]\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, "CHANGELOG.md has no `## [Unreleased]` section"
    headings = set(re.findall(r"^### (.+)$", match[1], re.MULTILINE))
    assert headings <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_readme_has_a_script_to_copy() -> None:
    assert any(
        "dlres_hetero_pipe" in block.code and block.no_test is None for block in README_BLOCKS
    )
