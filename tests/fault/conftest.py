"""Faults are counted by kind, for row 11."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def met(figure: Callable[..., None], request: pytest.FixtureRequest) -> Callable[[str], None]:
    """``met(kind)``, once a fault has ended in its typed error."""

    def count(kind: str) -> None:
        figure(11, request.node.name, faults=1, kinds=[kind])

    return count
