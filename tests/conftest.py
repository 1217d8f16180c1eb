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


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``figure(row, text, **numbers)`` records what a reliability test measured."""
    path = request.config.getoption("--figures")

    def record(row: int, text: str, **numbers: float | int | str) -> None:
        if path is not None:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"row": row, "text": text, "test": request.node.nodeid, **numbers}) + "\n")

    return record
