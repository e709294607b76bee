"""LitData and Mosaic are measured from their first shard on, without the start of their workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Runs in a process of its own, because the module replaces the package by an empty one.
PROGRAM = """
import sys
from pathlib import Path
from types import SimpleNamespace
from benchmarks.support.prefetch_peers import INDEX, Shards

first = Path(sys.argv[1])
shards = Shards("127.0.0.1:1", first)
shards._client = SimpleNamespace(number=len, fetch=lambda number: b"data")
assert shards.fetch(INDEX) == b"data" and not first.exists()
assert shards.fetch("shard 0") == b"data"
written = first.read_text()
assert float(written) > 0.0
shards.fetch("shard 1")
assert first.read_text() == written
"""


def test_the_clock_starts_at_the_first_shard_not_at_the_index(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "first")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
