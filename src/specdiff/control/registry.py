"""Controllers that need nothing but a budget, by name; the planner needs a plan too (`specdiff.control.planner`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from specdiff.checking import one_of
from specdiff.control.adaptive_length import AdaptiveLength
from specdiff.control.base import Controller, FixedBudget
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
    remedy = "use one of these names; the command line has 'planner' beside them"
    return one_of("controller", name, CONTROLLERS, remedy=remedy)
