"""Shared by all tests: one thread, offline, and a place for the figures that ``scripts/selfcheck.py`` prints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", default=None, help="append measured figures to this JSON-lines file")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How the p-values of the statistical matrix are spread: here, since worker processes print no summary."""
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.getreports(outcome)]
    cases = [v for r in reports if r.when == "call" for k, v in r.user_properties if k == "law_p_values"]
    if cases:
        from scipy.stats import kstest

        # one p-value a case: the two of a case share tokens, the cases share nothing
        uniform = kstest([values[-1] for values in cases], "uniform")
        terminalreporter.write_line(
            f"law of the loop: {len(cases)} cases, smallest p-value {min(map(min, cases)):.2g}; "
            f"one a case against uniform: Kolmogorov-Smirnov D = {uniform.statistic:.3f}, p = {uniform.pvalue:.2g}"
        )


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``figure(row, text, **numbers)`` records what a reliability test measured, for ``scripts/selfcheck.py``.

    Over all tests of a row numbers add up (``max_...`` and ``min_...``: the extreme), and lists become the set of what
    they name.
    """
    path = request.config.getoption("--figures")

    def record(row: int, text: str, **numbers: float | int | list[str] | list[int]) -> None:
        if path is not None:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"row": row, "text": text, "test": request.node.nodeid, **numbers}) + "\n")

    return record
