"""All objectives by name, and how to make one with its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, cast

from specdiff.errors import InputError
from specdiff.objectives.ar_distillation import ArDistillation
from specdiff.objectives.base import Objective
from specdiff.objectives.calibrated_streak import CalibratedStreak
from specdiff.objectives.d_pace import DPace
from specdiff.objectives.distill_spec import DistillSpec
from specdiff.objectives.masked import MaskedCrossEntropy
from specdiff.objectives.mdm import Mdm
from specdiff.objectives.sampled_streak import SampledStreak
from specdiff.objectives.streak import Streak
from specdiff.objectives.streak_stop_gradient import StreakStopGradient
from specdiff.objectives.tree_presence import TreePresence

_ALL: tuple[type[Objective], ...] = (
    Streak,
    StreakStopGradient,
    DPace,
    MaskedCrossEntropy,
    Mdm,
    ArDistillation,
    DistillSpec,
    CalibratedStreak,
    SampledStreak,
    TreePresence,
)

OBJECTIVES: Mapping[str, type[Objective]] = MappingProxyType({kind.name: kind for kind in _ALL})
"""Every objective by name; read-only."""

_NO_PARAMETERS: Mapping[str, object] = MappingProxyType({})


def parameters_of(name: str) -> Mapping[str, object]:
    """Return the parameters of the objective called ``name``, with their defaults.

    Raises:
        InputError: there is no such objective; the message lists all names.
    """
    return {field.name: field.default for field in fields(cast("Any", _kind(name)))}


def make(name: str, parameters: Mapping[str, object] = _NO_PARAMETERS) -> Objective:
    """Make the objective called ``name``.

    Args:
        name: one of `OBJECTIVES`.
        parameters: values by name for those that shall differ from the defaults.

    Raises:
        InputError: there is no such objective or parameter (the message lists what there is), or a value is wrong.
    """
    kind, known = _kind(name), parameters_of(name)
    for key in parameters:
        if key not in known:
            raise InputError.of(
                f"parameter of objective {name!r}",
                expected="one of " + ", ".join(known) if known else "none, for it has none",
                got=key,
                remedy="leave it out, or choose an objective that has it",
            )
    return cast("Any", kind)(**parameters)


def _kind(name: str) -> type[Objective]:
    if name not in OBJECTIVES:
        raise InputError.of(
            "objective",
            expected="one of " + ", ".join(sorted(OBJECTIVES)),
            got=name,
            remedy="use one of these names",
        )
    return OBJECTIVES[name]
