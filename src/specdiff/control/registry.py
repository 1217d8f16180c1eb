"""Controllers that need nothing but a budget, by name; the planner needs a plan too (`specdiff.control.planner`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from specdiff.control.adaptive_length import AdaptiveLength
from specdiff.control.base import Controller, FixedBudget
from specdiff.errors import InputError
from specdiff.types import Budget

CONTROLLERS: Mapping[str, Callable[[Budget], Controller]] = MappingProxyType(
    {"fixed": FixedBudget, "adl": AdaptiveLength}
)
"""What makes a request's controller from its budget; read-only."""


def get(name: str) -> Callable[[Budget], Controller]:
    """The controller called ``name``, for `specdiff.decoder.Settings`.

    Raises:
        InputError: there is none; the message lists all names.
    """
    if name not in CONTROLLERS:
        raise InputError.of(
            "controller",
            expected="one of " + ", ".join(CONTROLLERS),
            got=name,
            remedy="use one of these names; the command line has 'planner' beside them",
        )
    return CONTROLLERS[name]
