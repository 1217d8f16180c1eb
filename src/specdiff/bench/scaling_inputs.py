"""Measured pairs from a file that names what ``specdiff tune`` or ``specdiff generate --json`` left.

::

    {"pairs": [
      {"name": "0.13B", "target_parameters": 134.5e6, "drafter_parameters": 21e6, "plan": "plan.json"},
      {"name": "1.5B", "target_parameters": 1.54e9, "drafter_parameters": 0.49e9, "bytes_per_parameter": 2,
       "drafted": "rows.jsonl", "plain": "plain.jsonl"}]}

Paths are relative to the file. ``drafted`` and ``plain`` are rows of ``specdiff generate --file F --json``, the latter
with ``--drafter none``, on the same prompts. A plan has no acceptance by position: it is taken as geometric, with the
plan's own tau, and its samples are its contexts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specdiff.bench.scaling import Pair, Sample
from specdiff.control.costs import CostTable
from specdiff.errors import InputError

_NEEDED = {"name", "target_parameters", "drafter_parameters"}
_KNOWN = _NEEDED | {"bytes_per_parameter", "plan", "drafted", "plain"}


def read_pairs(path: Path, *, greedy: bool = True) -> list[Pair]:
    """Read a file of measured pairs.

    Args:
        path: see the module. greedy: which of a plan's two settings.

    Raises:
        InputError: the file, or one that it names, cannot be read or holds something else (named).
    """
    data = _json(path, path.read_text if path.is_file() else None)
    entries = data.get("pairs") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
        raise InputError.of(str(path), expected='{"pairs": [{...}, ...]}', got=str(data)[:80], remedy="see the help")
    return [_pair(entry, path.parent, greedy) for entry in entries]


def _pair(entry: Mapping[str, Any], folder: Path, greedy: bool) -> Pair:
    from_plan, from_rows = "plan" in entry, "drafted" in entry and "plain" in entry
    if not entry.keys() >= _NEEDED or not entry.keys() <= _KNOWN or from_plan == from_rows:
        raise InputError.of(
            "pair",
            expected=f"{sorted(_NEEDED)}, and either 'plan' or 'drafted' and 'plain'",
            got=sorted(entry),
            remedy="fix the file",
        )
    if from_plan:
        samples = plan_samples(folder / str(entry["plan"]), greedy=greedy)
    else:
        samples = row_samples(folder / str(entry["drafted"]), folder / str(entry["plain"]))
    return Pair(
        name=str(entry["name"]),
        target=entry["target_parameters"],
        drafter=entry["drafter_parameters"],
        samples=tuple(samples),
        bytes_per_parameter=entry.get("bytes_per_parameter", 2.0),
    )


def plan_samples(path: Path, *, greedy: bool) -> list[Sample]:
    """One sample a context of a plan's costs, at the planner's mean nodes and tau over the longest gamma it may use.

    Raises:
        InputError: it is no plan.
    """
    data = _json(path, path.read_text if path.is_file() else None)
    try:
        menu = data["greedy" if greedy else "sampled"]
        costs, planned = CostTable.from_dict(menu["costs"]), menu["planned"]
        gamma = max(arm["gamma"] for arm in menu["arms"])
        nodes, acceptance = round(planned["nodes"]), geometric(planned["tau"], gamma)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, "a plan of specdiff tune", error) from error
    return [
        Sample(
            step=step,
            target=costs.scoring(nodes, context),
            draft=draft,
            rest=0.0,  # a plan's target times hold it
            acceptance=acceptance,
        )
        for context, step, draft in zip(costs.contexts, costs.plain, costs.draft, strict=True)
    ]


def row_samples(drafted: Path, plain: Path) -> list[Sample]:
    """One sample a prompt that is in both files of ``specdiff generate --json``.

    Raises:
        InputError: a file is none, has no times, or they share no prompt; the plain one drafted.
    """
    plain_rows, samples = _rows(plain), []
    for prompt, row in _rows(drafted).items():
        other = plain_rows.get(prompt)
        if other is None:
            continue
        try:
            rounds, steps = row["rounds"], other["rounds"]
            if other["proposed"] or not row["proposed"]:
                raise InputError.of(
                    "plain", expected="rows without drafts beside rows with", got=str(plain), remedy="--drafter none"
                )
            samples.append(
                Sample(
                    step=(other["target_seconds"] + other["draft_seconds"] + other["verify_seconds"]) / steps,
                    target=row["target_seconds"] / rounds,
                    draft=row["draft_seconds"] / rounds,
                    rest=row["verify_seconds"] / rounds,
                    acceptance=tuple(row["acceptance_by_position"]),
                    weight=rounds,
                )
            )
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise _broken(drafted, "rows of specdiff generate --json", error) from error
    if not samples:
        raise InputError.of("drafted", expected=f"prompts of {plain}", got=str(drafted), remedy="use the same file")
    return samples


def geometric(tau: float, gamma: int) -> tuple[float, ...]:
    """[gamma] acceptance a, a^2, ... with ``tau = 1 + sum a^j``, by bisection."""
    if not 1 <= tau <= gamma + 1:
        raise InputError.of("tau", expected=f"a number in [1, {gamma + 1}]", got=tau, remedy="measure again")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if 1 + sum(middle**j for j in range(1, gamma + 1)) < tau:
            low = middle
        else:
            high = middle
    return tuple(high**j for j in range(1, gamma + 1))


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    """Totals by prompt."""
    try:
        items = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {item["prompt"]: item["totals"] for item in items}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _broken(path, "rows of specdiff generate --json", error) from error


def _json(path: Path, read: Callable[..., str] | None) -> Any:
    try:
        if read is None:
            raise FileNotFoundError("no such file")
        return json.loads(read(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _broken(path, "a JSON file", error) from error


def _broken(path: Path, expected: str, error: Exception) -> InputError:
    return InputError(f"{path}: expected {expected}, got {error!r}; check the path, or measure again")
