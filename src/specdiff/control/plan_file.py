"""A plan on disk: written once by ``specdiff tune``, valid for one pair on one machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from specdiff.control.costs import CostTable
from specdiff.control.planner import Plan, Prediction
from specdiff.errors import InputError
from specdiff.files import write_text
from specdiff.hub.folders import default_root
from specdiff.types import BestFirst, Budget, Chain, Samples, Shape, Siblings

FORMAT_VERSION = 1
_SHAPES: dict[str, type[Shape]] = {kind.__name__: kind for kind in (Chain, Samples, Siblings, BestFirst)}


def plan_path(identity: Mapping[str, str]) -> Path:
    """Where the plan of a pair is kept: one file a pair, dtype and device, overwritten by the next tuning."""
    keys = [identity[k] for k in ("target", "drafter", "dtype", "device") if k in identity]
    name = "--".join("".join(c if c.isalnum() or c in ".-_" else "_" for c in key) for key in keys)
    return default_root() / "plans" / f"{name}.json"


def save_plan(path: Path, plan: Plan, identity: Mapping[str, str]) -> None:
    """Write a plan, whole or not at all.

    Args:
        path: the file; its folder is made. identity: what the plan holds for, by name, compared when it is read.
    """
    data = {
        "format_version": FORMAT_VERSION,
        "identity": dict(identity),
        "costs": plan.costs.to_dict(),
        "prior": plan.prior,
        "greedy": _out(plan.greedy),
        "sampled": _out(plan.sampled),
        "opening": plan.opening,
        "interest": plan.interest,
        "limit": plan.limit,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(data, indent=1) + "\n")


def load_plan(path: Path, identity: Mapping[str, str]) -> Plan:
    """Read a plan that was measured for this identity.

    Raises:
        InputError: there is none, it cannot be read, or it is of another pair or machine (the differences are named).
    """
    if not path.is_file():
        raise InputError.of(
            "plan", expected="a tuned pair", got=f"no file {path}", remedy="measure it first: specdiff tune"
        )
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version, found = data["format_version"], dict(cast("dict[str, str]", data["identity"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _broken(path, error) from error
    if version != FORMAT_VERSION:
        raise InputError.of(
            "plan", expected=f"format {FORMAT_VERSION}", got=version, remedy="measure again: specdiff tune"
        )
    differs = [k for k in sorted({*identity, *found}) if identity.get(k) != found.get(k)]
    if differs:
        raise InputError.of(
            f"plan {path.name}",
            expected=", ".join(f"{k} {identity.get(k)!r}" for k in differs),
            got=", ".join(f"{k} {found.get(k)!r}" for k in differs),
            remedy="it was measured for another pair or machine; measure again: specdiff tune",
        )
    try:
        return Plan(
            costs=CostTable.from_dict(data["costs"]),
            prior=tuple(float(v) for v in data["prior"]),
            greedy=_in(data["greedy"]),
            sampled=_in(data["sampled"]),
            opening=data["opening"],
            interest=data["interest"],
            limit=data["limit"],
        )
    except InputError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> InputError:
    return InputError(f"plan: expected a file of specdiff tune at {path}, got {error!r}; measure again: specdiff tune")


def _out(prediction: Prediction) -> dict[str, Any]:
    budget = prediction.budget
    shape = {name: value for name, value in asdict(budget.shape).items() if name != "size"}
    return {
        "gamma": budget.gamma,
        "temperature": budget.temperature,
        "shape": {"kind": type(budget.shape).__name__, **shape},
        "tau": prediction.tau,
        "speedup": prediction.speedup,
        "nodes": prediction.nodes,
    }


def _in(data: dict[str, Any]) -> Prediction:
    shape = dict(data["shape"])
    kind = _SHAPES[shape.pop("kind")]
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in shape.items()}
    budget = Budget(gamma=data["gamma"], temperature=data["temperature"], shape=kind(**values))
    budget.validate()
    return Prediction(budget=budget, tau=float(data["tau"]), speedup=float(data["speedup"]), nodes=float(data["nodes"]))
