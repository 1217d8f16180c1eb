"""The reliability table: run the tests behind each row and print their counts and measured figures.

usage: python scripts/selfcheck.py [--full] [--rows 1,4,7] [--out selfcheck.json]

Without --full each row runs its share of the default suite; --full adds the slow tests, the full statistical matrix and
the mutants.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Row:
    """One row of the table: what must hold, the tests that show it, and what a bare pass means."""

    number: int
    title: str
    goal: str
    tests: tuple[str, ...]


ROWS = (
    Row(1, "exact identity of every rule", "<= 1e-12 in float64", ("tests/exact",)),
    Row(2, "statistical law of the whole loop", "0 rejections at 1e-6", ("tests/statistical",)),
    Row(3, "planted faults", "all killed, both look-alikes pass", ()),
    Row(4, "T = 0 parity with generate", "all equal in fp32", ("tests/parity/test_generate_parity.py",)),
    Row(
        5,
        "option parity",
        "every option acts at every position, or is refused",
        ("tests/parity/test_options.py", "tests/unit/test_sampling.py", "tests/unit/test_generation_config.py"),
    ),
    Row(
        6,
        "stop and budget",
        "text, reason and usage equal plain decoding's",
        ("tests/parity/test_stops.py", "tests/unit/test_stopping.py"),
    ),
    Row(
        7,
        "cache invariants",
        "cache length = committed length; dead slots are dead",
        ("tests/parity/test_target_tree_pass.py",),
    ),
    Row(8, "batch parity", "each row equals the row alone", ("tests/parity/test_batch_parity.py",)),
    Row(
        9,
        "acceptance integrity",
        "an oracle is accepted to 1.0; recounts equal the records",
        ("tests/parity/test_drafters.py", "tests/unit/test_records.py"),
    ),
    Row(
        10,
        "seeds",
        "the same alone, batched, streamed, restarted",
        ("tests/unit/test_seeds.py", "tests/unit/test_randomness.py"),
    ),
    Row(11, "fault injection", ">= 30 faults, each a typed error", ("tests/fault",)),
    Row(13, "streaming", "concatenation equals the full decode", ("tests/unit/test_text_stream.py",)),
)


def pytest(row: Row, *, full: bool, figures: Path) -> tuple[int, int, float]:
    """Run a row's tests: (passed, failed, seconds)."""
    tests = [t for t in row.tests if (ROOT / t).exists()]
    missing = set(row.tests) - set(tests)
    if missing:
        raise SystemExit(f"row {row.number}: no such tests: {', '.join(sorted(missing))}")
    marks = "not weights and not gpu and not network" + ("" if full else " and not slow and not proof")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks]
    command += ["--figures", str(figures), *tests]
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    if done.returncode not in (0, 1) or not counts:
        raise SystemExit(f"row {row.number}: pytest exited {done.returncode}\n{done.stdout[-2000:]}")
    return counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0), time.monotonic() - began


def main() -> int:
    """Print the table; exit 1 if any test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--rows", help="only these, e.g. 1,4,7")
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    options = parser.parse_args()
    wanted = {int(n) for n in options.rows.split(",")} if options.rows else {row.number for row in ROWS}
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    print(
        f"commit {commit or 'unknown'}, Python {platform.python_version()}, {platform.machine()}, "
        f"{'full' if options.full else 'default'} share"
    )
    table: list[dict[str, object]] = []
    failed_any = False
    for row in ROWS:
        if row.number not in wanted:
            continue
        if row.number == 3:
            if not options.full:
                print(f"{row.number:>3}  {row.title}: run with --full, or make mutants")
                continue
            code = subprocess.run([sys.executable, "scripts/mutants.py"], cwd=ROOT, check=False).returncode
            failed_any |= code != 0
            table.append({"row": 3, "title": row.title, "passed": code == 0})
            continue
        with tempfile.TemporaryDirectory() as folder:
            figures = Path(folder) / "figures.jsonl"
            passed, failed, seconds = pytest(row, full=options.full, figures=figures)
            measured = [json.loads(line) for line in figures.read_text().splitlines()] if figures.exists() else []
        failed_any |= failed > 0
        print(f"{row.number:>3}  {row.title}: {passed} passed, {failed} failed ({seconds:.0f} s); goal: {row.goal}")
        for text in sorted({m["text"] for m in measured if m["row"] == row.number}):
            print(f"       {text}")
        table.append(
            {
                "row": row.number,
                "title": row.title,
                "goal": row.goal,
                "passed": passed,
                "failed": failed,
                "figures": [m for m in measured if m["row"] == row.number],
            }
        )
    if options.out is not None:
        partial = options.out.with_suffix(".partial")
        partial.write_text(json.dumps(table, indent=1), encoding="utf-8")
        partial.replace(options.out)
    return 1 if failed_any else 0


if __name__ == "__main__":
    sys.exit(main())
