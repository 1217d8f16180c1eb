"""``specdiff tune``: measure a pair on this machine, for the planner."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from specdiff.bench.tune import identity, tune
from specdiff.cli import options as o
from specdiff.cli.generate import read_prompts
from specdiff.control.plan_file import plan_path, save_plan
from specdiff.control.planner import Prediction
from specdiff.decoder import load
from specdiff.errors import InputError
from specdiff.types import Shape


def tune_(
    target: Annotated[str, typer.Argument(help="Catalog name, local folder, or Hugging Face id.")] = "smollm2-135m",
    drafter: Annotated[str, typer.Argument(help="As for generate.")] = "default",
    file: Annotated[
        Path | None, typer.Option("--file", help="Sample prompts, like those to come; default: seven of our own.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first prompts of the file.")] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", "-n", help="To decode for each prompt.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Of the sampled part, > 0.")] = 1.0,
    out: Annotated[Path | None, typer.Option("--out", help="Where the plan goes; default: the cache.")] = None,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
) -> None:
    """Measure what rounds cost and which drafts pay; keep it for --controller planner."""
    if not 0 < temperature < float("inf"):
        raise InputError.of("--temperature", expected="a number > 0", got=temperature, remedy="leave it out for 1")
    if new_tokens < 2:
        raise InputError.of("--new-tokens", expected="an integer >= 2", got=new_tokens, remedy="leave it out for 64")
    texts = read_prompts(None, file, limit) if file else samples()
    log = Console(stderr=True, highlight=False, quiet=as_json)
    decoder = load(target, drafter, dtype=dtype, device=device)
    chat = bool(decoder.tokenizer and decoder.tokenizer.chat_template)
    names = identity(decoder)
    result = tune(
        decoder,
        [decoder.encode(text, chat=chat) for text in texts],
        new_tokens=new_tokens,
        temperature=temperature,
        clock=device_clock(names.get("device", "cpu")),
        progress=lambda what: log.print(f"measuring: {what}"),
    )
    path = out or plan_path(names)
    save_plan(path, result.plan, names)
    if as_json:
        report = {"path": str(path), "seconds": result.seconds, "identity": names}
        report |= {"costs": result.plan.costs.to_dict(), "prior": result.plan.prior}
        report |= {"greedy": to_json(result.plan.greedy), "sampled": [to_json(p) for p in result.sampled]}
        print(json.dumps(report))
        return
    table = Table("temperature", "draft", "tau", "nodes", "over plain decoding")
    rows = [("0", result.plan.greedy), *((f"{temperature:g}", p) for p in result.sampled)]
    for at, p in rows:
        table.add_row(
            at, describe(p.budget.shape, p.budget.gamma), f"{p.tau:.2f}", f"{p.nodes:.1f}", f"{p.speedup:.2f}x"
        )
    console = Console(highlight=False)
    console.print(table)
    for at, p in rows[:2]:
        if p.speedup <= 1:
            console.print(f"At temperature {at} drafting does not pay here: the planner decodes plainly and retries.")
    console.print(f"Measured in {result.seconds:.0f} s, kept in {path}")


def samples() -> list[str]:
    """The sample prompts that ship with the package: sums, code, instructions, a story, a translation."""
    text = resources.files("specdiff").joinpath("assets/tune_prompts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["prompt"] for line in text.splitlines()]


def device_clock(device: str) -> Callable[[], float]:
    """Seconds; waits for an accelerator first."""
    if device == "cpu":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return clock


def describe(shape: Shape, gamma: int) -> str:
    """A shape as the command line writes it, and its window."""
    values = [v for name, v in asdict(shape).items() if name != "size"]
    text = ",".join(str(v) for value in values for v in (value if isinstance(value, tuple) else (value,)))
    kind = {"Chain": "chain", "Samples": "samples", "Siblings": "siblings", "BestFirst": "best-first"}
    return f"{kind[type(shape).__name__]}{':' + text if text else ''}, gamma {gamma}"


def to_json(p: Prediction) -> dict[str, object]:
    """A prediction as plain data."""
    return {
        "draft": describe(p.budget.shape, p.budget.gamma),
        "tau": p.tau,
        "nodes": p.nodes,
        "speedup": p.speedup,
    }
