"""The reliability table: run the tests behind each row and print its figure, held against what the row asks for.

usage: python scripts/selfcheck.py [--full] [--rows 1,4,7] [--details] [--out selfcheck.json]

The slow tests and the planted faults are part of it. Only row 2 runs its share of the default suite, unless --full asks
for the whole statistical matrix (``SPECDIFF_LAW_SEQUENCES`` sets its size; the full size takes more than a day).

A row holds if every file behind it ran at least one test, no test failed, and the figures that its tests recorded (the
``figure`` fixture) reach what the row asks for. A row without a figure does not hold.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq}
Value = float | int | list[str] | list[int]


@dataclass(frozen=True)
class Row:
    """One row of the table: what must hold, the tests that show it, and the least figures, as ``name: "op number"``."""

    number: int
    title: str
    tests: tuple[str, ...]
    needs: dict[str, str]


ROWS = (
    Row(
        1,
        "exact identity of every rule",
        ("tests/exact",),
        {"max_error": "<= 1e-12", "rules": ">= 9", "laws": ">= 1000"},
    ),
    Row(
        2,
        "statistical law of the whole loop, at 1e-6",
        ("tests/statistical",),
        {"rejected": "== 0", "sequences": ">= 20000"},
    ),
    Row(3, "planted faults", (), {"planted": ">= 15", "survived": "== 0", "look_alikes_rejected": "== 0"}),
    Row(
        4,
        "T = 0 parity with generate, fp32",
        ("tests/parity/test_generate_parity.py",),
        {
            "cases": ">= 1000",
            "different": "== 0",
            "architectures": ">= 6",
            "gammas": "== 16",
            "acceptance": "== 4",
        },
    ),
    Row(
        5,
        "option parity",
        ("tests/parity/test_options.py", "tests/unit/test_sampling.py", "tests/unit/test_generation_config.py"),
        {"options": ">= 16", "cases": ">= 200", "laws": ">= 200", "different": "== 0", "ignored": "== 0"},
    ),
    Row(
        6,
        "stop and budget: text, reason and usage",
        ("tests/parity/test_stops.py", "tests/unit/test_stopping.py"),
        {"ends": "== 3", "gammas": "== 17", "budgets": "== 20", "offsets": ">= 20", "equal": ">= 20000"},
    ),
    Row(
        7,
        "cache invariants",
        ("tests/parity/test_target_tree_pass.py",),
        {
            "architectures": ">= 12",
            "lengths_checked": ">= 500",
            "lengths_wrong": "== 0",
            "logits_compared": ">= 10000",
            "logits_changed": "== 0",
            "windows_crossed": ">= 3",
        },
    ),
    Row(
        8,
        "batch parity",
        ("tests/parity/test_batch_parity.py",),
        {"sizes": "== 7", "rows": ">= 100", "different": "== 0"},
    ),
    Row(
        9,
        "acceptance integrity",
        ("tests/parity/test_drafters.py", "tests/unit/test_records.py"),
        {
            "min_oracle_acceptance": ">= 1",
            "recounted": ">= 100",
            "miscounted": "== 0",
            "max_spread_over_depth": "<= 0.05",
        },
    ),
    Row(
        10,
        "seeds",
        ("tests/unit/test_seeds.py", "tests/unit/test_randomness.py"),
        {"ways": ">= 6", "equal": ">= 50"},
    ),
    Row(
        11,
        "fault injection: typed errors, neighbours unharmed",
        ("tests/fault",),
        {"faults": ">= 30", "kinds": ">= 10"},
    ),
    Row(
        13,
        "streaming",
        ("tests/unit/test_text_stream.py",),
        {"tokenizers": ">= 9", "streams": ">= 500", "wrong": "== 0", "stray": "== 0"},
    ),
)


@dataclass
class Outcome:
    """What came out for one row."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    records: list[dict[str, object]] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def run_tests(row: Row, *, full: bool) -> Outcome:
    """Run a row's tests; count them from pytest's own report."""
    marks = "not weights and not gpu and not network"
    if row.number == 2 and not full:
        marks += " and not slow and not proof"
    with tempfile.TemporaryDirectory() as folder:
        report, figures = Path(folder) / "report.xml", Path(folder) / "figures.jsonl"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "junit_family=xunit1",
            "-m",
            marks,
        ]
        command += ["--figures", str(figures), "--junitxml", str(report), *row.tests]
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        outcome = Outcome(seconds=time.monotonic() - began)
        if done.returncode not in (0, 1) or not report.exists():
            outcome.failed = 1
            outcome.complaints.append(f"pytest exited {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
            return outcome
        ran: set[str] = set()
        for case in ET.parse(report).getroot().iter("testcase"):
            tags = {child.tag for child in case}
            if tags & {"failure", "error"}:
                outcome.failed += 1
                outcome.complaints.append(f"failed: {case.get('classname')}::{case.get('name')}")
            elif "skipped" in tags:
                outcome.skipped += 1
            else:
                outcome.passed += 1
                ran.add(case.get("classname", ""))
        for path in row.tests:
            module = path.removesuffix(".py").replace("/", ".")
            if not any(f"{name}.".startswith(f"{module}.") for name in ran):
                outcome.complaints.append(f"no test of {path} passed")
        if figures.exists():
            records = [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()]
            outcome.records = [r for r in records if r["row"] == row.number]
    return outcome


def run_mutants() -> Outcome:
    """Plant every fault; one record with what was killed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "mutants.json"
        command = [sys.executable, "scripts/mutants.py", "--out", str(report)]
        began = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        outcome = Outcome(seconds=time.monotonic() - began)
        if not report.exists():
            outcome.failed = 1
            outcome.complaints.append(f"mutants exited {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
            return outcome
        result = json.loads(report.read_text(encoding="utf-8"))
    killed, controls = result["killed"], result["controls"]
    outcome.passed, outcome.failed = sum(killed.values()), sum(not dead for dead in killed.values())
    outcome.complaints += [f"survived: {name}" for name, dead in killed.items() if not dead]
    outcome.complaints += [f"rejected, though exact: {name}" for name, passed in controls.items() if not passed]
    figure = {
        "planted": len(killed),
        "killed": outcome.passed,
        "survived": outcome.failed,
        "look_alikes": len(controls),
        "look_alikes_rejected": sum(not passed for passed in controls.values()),
    }
    outcome.records = [{"row": 3, "text": "planted faults", "test": "scripts/mutants.py", **figure}]
    return outcome


def fold(records: Sequence[dict[str, object]]) -> dict[str, Value]:
    """One figure out of many: lists are joined, ``max_`` and ``min_`` are extremes, all other numbers add up."""
    columns: dict[str, list[object]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("row", "text", "test"):
                columns.setdefault(name, []).append(value)
    return {name: folded(name, values) for name, values in columns.items()}


def folded(name: str, values: list[object]) -> Value:
    if isinstance(values[0], list):
        return sorted({item for value in values for item in value})  # type: ignore[attr-defined]
    numbers: list[float] = [float(v) if isinstance(v, float) else int(v) for v in values]  # type: ignore[call-overload]
    return max(numbers) if name.startswith("max_") else min(numbers) if name.startswith("min_") else sum(numbers)


def shown(name: str, value: Value) -> str:
    words = name.replace("_", " ")
    if isinstance(value, list):
        if all(isinstance(item, int) for item in value):
            return f"{words} {value[0]}..{value[-1]} ({len(value)})"
        return f"{words} {len(value)} ({', '.join(map(str, value))})"
    return f"{words} {value:,}" if isinstance(value, int) else f"{words} {value:.3g}"


def unmet(row: Row, figure: dict[str, Value]) -> list[str]:
    """What the row asks for and the figure does not show."""
    missing: list[str] = []
    for name, need in row.needs.items():
        sign, bound = need.split()
        value = figure.get(name)
        number = len(value) if isinstance(value, list) else value
        if number is None:
            missing.append(f"no figure: {name} {need}")
        elif not COMPARE[sign](number, float(bound)):
            missing.append(f"{shown(name, value)}, asked for {need}")  # type: ignore[arg-type]
    return missing


def main() -> int:
    """Print the table; exit 1 unless every row holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the whole statistical matrix too")
    parser.add_argument("--rows", help="only these, e.g. 1,4,7")
    parser.add_argument("--details", action="store_true", help="also print what each test recorded")
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    options = parser.parse_args()
    known = {row.number for row in ROWS}
    wanted = {int(n) for n in options.rows.split(",")} if options.rows else known
    if wanted - known:
        parser.error(f"no such rows: {sorted(wanted - known)}")
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    print(f"commit {commit or 'unknown'}, Python {platform.python_version()}, {platform.machine()}", flush=True)
    table: list[dict[str, object]] = []
    for row in ROWS:
        if row.number not in wanted:
            continue
        outcome = run_tests(row, full=options.full) if row.tests else run_mutants()
        figure = fold(outcome.records)
        complaints = [*outcome.complaints, *unmet(row, figure)]
        holds = outcome.passed > 0 and outcome.failed == 0 and not complaints
        counts = f"{outcome.passed:,} passed, {outcome.failed} failed, {outcome.skipped} skipped"
        print(f"{row.number:>3}  {'holds' if holds else 'FAILS'}  {row.title} ({counts}, {outcome.seconds:.0f} s)")
        print(f"       {'; '.join(shown(name, value) for name, value in figure.items()) or 'no figure'}")
        if options.details:
            for r in outcome.records:
                rest = {name: value for name, value in r.items() if name not in ("row", "text", "test")}
                print(f"         {r['text']}: {rest}")
        for complaint in complaints:
            print(f"       ! {complaint}")
        sys.stdout.flush()
        table.append(
            {
                "row": row.number,
                "title": row.title,
                "needs": row.needs,
                "holds": holds,
                "passed": outcome.passed,
                "failed": outcome.failed,
                "skipped": outcome.skipped,
                "figure": figure,
                "complaints": complaints,
                "records": outcome.records,
            }
        )
    if options.out is not None:
        partial = options.out.with_suffix(".partial")
        partial.write_text(json.dumps(table, indent=1), encoding="utf-8")
        partial.replace(options.out)
    held = sum(bool(entry["holds"]) for entry in table)
    print(f"{held} of {len(table)} rows hold")
    return 0 if held == len(table) else 1


if __name__ == "__main__":
    sys.exit(main())
