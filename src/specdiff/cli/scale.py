"""``specdiff scale``: what a drafter would bring at sizes that were not measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specdiff.bench.scaling import ASSUMED_BETA, Scaling, hold_out, project
from specdiff.bench.scaling_inputs import read_pairs
from specdiff.cli.reason import parse_numbers
from specdiff.errors import InputError


def scale(
    measured: Annotated[
        Path,
        typer.Argument(
            help='JSON: {"pairs": [{"name", "target_parameters", "drafter_parameters", "bytes_per_parameter", and '
            '"plan" (specdiff tune --out) or "drafted" and "plain" (rows of specdiff generate --json)}]}.'
        ),
    ],
    target: Annotated[float, typer.Option("--target", help="Parameters of the target.")] = 72e9,
    drafters: Annotated[
        str, typer.Option("--drafters", help="Parameters of drafters, separated by commas.")
    ] = "0.5e9,1.5e9,3e9,7e9",
    gamma: Annotated[int | None, typer.Option("--gamma", help="Window; default: the longest measured.")] = None,
    bytes_per_parameter: Annotated[float, typer.Option("--bytes", help="Bytes of a parameter.")] = 2.0,
    bandwidth: Annotated[
        float | None,
        typer.Option("--bandwidth", help="Bytes a second of another machine; default: as fitted on this one."),
    ] = None,
    beta: Annotated[
        str, typer.Option("--beta", help="Assumed range of the misses' power, where it cannot be fitted: LOW,HIGH.")
    ] = f"{ASSUMED_BETA[0]:g},{ASSUMED_BETA[1]:g}",
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="0 or above: which of a plan's settings.")
    ] = 0.0,
    resamples: Annotated[int, typer.Option("--resamples", help="For the intervals.")] = 500,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
) -> None:
    """Project the speed-up for other sizes from measured pairs, with the model's error where it can be measured."""
    if not 0 <= temperature < float("inf"):
        raise InputError.of("--temperature", expected="a number >= 0", got=temperature, remedy="leave it out for 0")
    try:
        low, high = (float(part) for part in beta.split(","))
    except ValueError as error:
        raise InputError.of("--beta", expected="LOW,HIGH", got=beta, remedy="for example 0,0.4") from error
    pairs = read_pairs(measured, greedy=temperature == 0)
    result = project(
        pairs,
        target,
        parse_numbers("--drafters", drafters),
        gamma=max(len(p.mean.acceptance) for p in pairs) if gamma is None else gamma,
        bytes_per_parameter=bytes_per_parameter,
        bandwidth=bandwidth,
        assumed_beta=(low, high),
        resamples=resamples,
        seed=seed,
    )
    errors = hold_out(pairs)
    if as_json:
        report = asdict(result) | {"hold_out": [asdict(e) for e in errors], "pairs": [p.name for p in pairs]}
        print(json.dumps(report))
        return
    console = Console(highlight=False)
    console.print(_table(result))
    low, high = result.best_interval
    console.print(
        f"best drafter for {_size(target)}: {_size(result.best)} (95 % {_size(low)} to {_size(high)}), "
        f"{result.best_speedup:.2f}x"
    )
    low, high = result.beta_interval
    console.print(f"beta {result.beta:.2f} ({low:.2f} to {high:.2f}), {'fitted' if result.fitted else 'assumed'}")
    for e in errors:
        console.print(
            f"{e.name} projected from the others: {e.projected:.2f}x, measured {e.measured:.2f}x ({e.error:+.0%})"
        )
    if not errors:
        console.print("One pair only: the model's own error cannot be measured.")
    console.print("Intervals are the spread of the inputs; they do not hold the error of the model's form.")


def _table(result: Scaling) -> Table:
    table = Table("target", "drafter", "gamma", "tau", "95 %", "speed-up", "95 %")
    for p in result.projections:
        table.add_row(
            _size(p.target),
            _size(p.drafter),
            str(p.gamma),
            f"{p.tau:.2f}",
            f"{p.tau_interval[0]:.2f} to {p.tau_interval[1]:.2f}",
            f"{p.speedup:.2f}x",
            f"{p.speedup_interval[0]:.2f} to {p.speedup_interval[1]:.2f}",
        )
    return table


def _size(parameters: float) -> str:
    """Billions of parameters."""
    return f"{parameters / 1e9:.3g}B"
