"""The budget a drafter gets when the caller names none: frozen settings, chosen on held-out training prompts."""

from __future__ import annotations

from specdiff.drafters.base import Drafter
from specdiff.drafters.checked import check_drafter, declared_provenance
from specdiff.errors import InputError
from specdiff.types import BestFirst, Budget, Chain, Provenance, Shape, Siblings

GREEDY_SHAPES: tuple[Shape, ...] = (BestFirst(8), Chain())
"""Tried in order at temperature 0: a fixed tree loses nothing to a sampled one there (docs/rules.md, fact 4)."""
SAMPLED_SHAPES: tuple[Shape, ...] = (Siblings((3, 1, 1)), BestFirst(8), Chain())
"""Tried in order above: wide at the root, where it hedges best, and about as many nodes (docs/results.md)."""
GAMMA = 8


def default_budget(drafter: Drafter | None, *, greedy: bool, gamma: int | None = None) -> Budget:
    """The first of the default shapes that the drafter can build, at its full window.

    Raises:
        InputError: ``gamma`` is below 1 or beyond the drafter's window, or the drafter is none.
        DrafterError: the drafter failed to say what it can build.
    """
    check_drafter(drafter)
    limit = drafter.max_gamma if drafter is not None else None
    if gamma is not None and (gamma < 1 or (limit is not None and gamma > limit)):
        raise InputError.of(
            "gamma",
            expected=f"1..{limit}" if limit else ">= 1",
            got=gamma,
            remedy="leave it out for the drafter's window",
        )
    window = gamma if gamma is not None else (limit or GAMMA)
    if drafter is None:
        return Budget(gamma=window, shape=Chain())
    for shape in GREEDY_SHAPES if greedy else SAMPLED_SHAPES:
        budget = Budget(gamma=window, shape=shape)
        try:
            provenance = declared_provenance(drafter, budget)
        except InputError:
            continue
        if isinstance(shape, Siblings) and provenance is Provenance.FIXED:
            continue  # the siblings' q is lost, so a best-first tree of the same size accepts more
        return budget
    raise InputError.of(
        "drafter",
        expected="a drafter that can build a tree or a chain",
        got=drafter.name,
        remedy="give the budget's shape explicitly",
    )
