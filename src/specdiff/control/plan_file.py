"""A plan on disk: written once by ``specdiff tune``, valid for one pair on one machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from specdiff.control.costs import CostTable
from specdiff.control.menu import Arm, Menu, Prediction
from specdiff.control.plan import Plan
from specdiff.errors import InputError
from specdiff.files import write_text
from specdiff.hub.folders import default_root
from specdiff.shapes import parse_shape, shape_text
from specdiff.types import Budget

FORMAT_VERSION = 2
_AGAIN = "measure again: specdiff tune --again"


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
        "greedy": menu_to_dict(plan.greedy),
        "sampled": menu_to_dict(plan.sampled),
        "temperature": plan.temperature,
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
        raise InputError.of("plan", expected=f"format {FORMAT_VERSION}", got=version, remedy=_AGAIN)
    differs = [k for k in sorted({*identity, *found}) if identity.get(k) != found.get(k)]
    if differs:
        raise InputError.of(
            f"plan {path.name}",
            expected=", ".join(f"{k} {identity.get(k)!r}" for k in differs),
            got=", ".join(f"{k} {found.get(k)!r}" for k in differs),
            remedy=f"it was measured for another pair or machine; {_AGAIN}",
        )
    try:
        return Plan(
            greedy=_menu(data["greedy"]),
            sampled=_menu(data["sampled"]),
            temperature=data["temperature"],
            opening=data["opening"],
            interest=data["interest"],
            limit=data["limit"],
        )
    except InputError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> InputError:
    return InputError(f"plan: expected a file of specdiff tune at {path}, got {error!r}; {_AGAIN}")


def menu_to_dict(menu: Menu) -> dict[str, Any]:
    """JSON form."""
    return {
        "costs": menu.costs.to_dict(),
        "prior": menu.prior,
        "arms": [
            {
                "shape": shape_text(arm.budget.shape),
                "gamma": arm.budget.gamma,
                "draft_temperature": arm.budget.temperature,
                "accepted": arm.accepted,
                "nodes": arm.nodes,
                "seconds": arm.seconds,
            }
            for arm in menu.arms
        ],
        "planned": asdict(menu.planned),
        "fixed": [{"setting": name, **asdict(prediction)} for name, prediction in menu.fixed],
    }


def _menu(data: dict[str, Any]) -> Menu:
    return Menu(
        costs=CostTable.from_dict(data["costs"]),
        prior=tuple(float(v) for v in data["prior"]),
        arms=tuple(_arm(arm) for arm in data["arms"]),
        planned=_prediction(data["planned"]),
        fixed=tuple((str(item["setting"]), _prediction(item)) for item in data["fixed"]),
    )


def _arm(data: dict[str, Any]) -> Arm:
    shape, gamma, temperature = parse_shape(data["shape"]), data["gamma"], data["draft_temperature"]
    return Arm(
        budget=Budget(gamma=gamma, shape=shape, temperature=temperature),
        accepted=data["accepted"],
        nodes=data["nodes"],
        seconds=tuple(float(v) for v in data["seconds"]),
    )


def _prediction(data: dict[str, Any]) -> Prediction:
    return Prediction(tau=float(data["tau"]), speedup=float(data["speedup"]), nodes=float(data["nodes"]))
