"""The reliability table cannot hold without figures: what ``scripts/selfcheck.py`` makes of missing and small ones."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("selfcheck_script", _ROOT / "scripts" / "selfcheck.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_row_is_there_with_its_tests_and_asks_for_a_figure(script: ModuleType) -> None:
    assert [row.number for row in script.ROWS] == [*range(1, 12), 13]
    assert all(row.needs for row in script.ROWS)
    assert all((_ROOT / test).exists() for row in script.ROWS for test in row.tests)


def test_figures_add_up(script: ModuleType) -> None:
    records = [
        {"row": 4, "text": "a", "test": "t", "cases": 3, "max_error": 0.5, "min_share": 1.0, "kinds": ["x", "y"]},
        {"row": 4, "text": "b", "test": "t", "cases": 4, "max_error": 0.25, "min_share": 0.5, "kinds": ["y"]},
    ]
    assert script.fold(records) == {"cases": 7, "max_error": 0.5, "min_share": 0.5, "kinds": ["x", "y"]}


@pytest.mark.parametrize(
    ("figure", "complaints"),
    [
        ({"cases": 1000, "different": 0, "kinds": ["a", "b"]}, 0),
        ({"cases": 999, "different": 0, "kinds": ["a", "b"]}, 1),
        ({"cases": 1000, "different": 1, "kinds": ["a", "b"]}, 1),
        ({"cases": 1000, "different": 0, "kinds": ["a"]}, 1),
        ({"cases": 1000, "kinds": ["a", "b"]}, 1),
        ({}, 3),
    ],
)
def test_a_row_says_what_it_lacks(script: ModuleType, figure: dict[str, object], complaints: int) -> None:
    row = script.Row(4, "", ("tests",), {"cases": ">= 1000", "different": "== 0", "kinds": ">= 2"})
    assert len(script.unmet(row, figure)) == complaints


def test_a_row_whose_tests_do_not_run_has_nothing_to_show(script: ModuleType) -> None:
    outcome = script.run_tests(script.Row(4, "", ("tests/support",), {}), full=False)  # a folder without tests
    assert outcome.passed == 0
    assert outcome.complaints
