"""``specdiff tune``: measure a pair on this machine, for the planner; and hold the plan against what is measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from specdiff.bench.compare import compare
from specdiff.bench.tune import identity, planned, tune
from specdiff.cli import options as o
from specdiff.cli.generate import plain_baselines, read_prompts
from specdiff.control.menu import Menu
from specdiff.control.plan import Plan
from specdiff.control.plan_file import load_plan, menu_to_dict, plan_path, save_plan
from specdiff.decoder import SpeculativeDecoder, load
from specdiff.errors import InputError
from specdiff.machine import load as machine_load
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions

BUSY_LOAD, BUSY_SPREAD = 0.5, 0.15
"""Load beside our own threads, and spread of repeated timings, from which on a machine counts as busy."""


def tune_(
    target: Annotated[str, typer.Argument(help="Catalog name, local folder, or Hugging Face id.")] = "smollm2-135m",
    drafter: Annotated[str, typer.Argument(help="As for generate.")] = "default",
    file: Annotated[
        Path | None, typer.Option("--file", help="Sample prompts, like those to come; default: seven of our own.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first prompts of the file.")] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", "-n", help="To decode for each prompt.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Of the sampled part, > 0.")] = 1.0,
    out: Annotated[Path | None, typer.Option("--out", help="Where the plan is kept; default: the cache.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure although there is a plan; it is replaced.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Then decode the prompts with the planner and plainly, prompt by prompt.")
    ] = False,
    check_dtypes: Annotated[
        str | None, typer.Option("--check-dtypes", help="With --check: plain decoding in these dtypes too: bf16,fp32.")
    ] = None,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
) -> None:
    """Measure what rounds cost and which drafts pay; keep it for --controller planner. A plan kept before is shown."""
    if not 0 < temperature < float("inf"):
        raise InputError.of("--temperature", expected="a number > 0", got=temperature, remedy="leave it out for 1")
    if new_tokens < 2:
        raise InputError.of("--new-tokens", expected="an integer >= 2", got=new_tokens, remedy="leave it out for 64")
    if check_dtypes and not check:
        raise InputError.of("--check-dtypes", expected="--check beside it", got=check_dtypes, remedy="add --check")
    texts = read_prompts(None, file, limit) if file else samples()
    log = Console(stderr=True, highlight=False)
    load_before = machine_load()
    decoder = load(target, drafter, dtype=dtype, device=device)
    chat = bool(decoder.tokenizer and decoder.tokenizer.chat_template)
    prompts = [decoder.encode(text, chat=chat) for text in texts]
    names = identity(decoder)
    path = out or plan_path(names)
    busy, seconds = _busy(load_before, 0.0), None
    if again or not path.exists():
        with Progress(console=log, transient=True, disable=as_json) as bar:
            task = bar.add_task("measuring", total=None)
            result = tune(
                decoder,
                prompts,
                new_tokens=new_tokens,
                temperature=temperature,
                clock=device_clock(names.get("device", "cpu")),
                progress=lambda what: bar.update(task, description=f"measuring: {what}"),
            )
        plan, seconds, busy = result.plan, result.seconds, _busy(load_before, result.spread)
        save_plan(path, plan, names)
    else:
        plan = load_plan(path, names)
    checks: list[dict[str, object]] = []
    if check:
        baselines = (target, check_dtypes, device)
        checks = [_check(decoder, plan, prompts, t, new_tokens, baselines, log) for t in (0.0, plan.temperature)]
    if as_json:
        report: dict[str, object] = {"path": str(path), "seconds": seconds, "identity": names, "busy": busy}
        report |= {"greedy": menu_to_dict(plan.greedy), "sampled": menu_to_dict(plan.sampled), "checks": checks}
        print(json.dumps(report))
        return
    if busy:
        log.print(f"warning: {busy}; times may be wrong: measure again on a quiet machine: specdiff tune --again")
    _show(plan, checks)
    kept = f"kept in {path}"
    Console(highlight=False).print(f"Measured in {seconds:.0f} s, {kept}" if seconds else f"Measured before, {kept}")


def _busy(load_before: float | None, spread: float) -> str:
    """Why the machine counts as busy; empty where it does not."""
    found: list[str] = []
    if load_before is not None and load_before > BUSY_LOAD:
        found.append(f"the machine was busy before (load {load_before:.1f})")
    if spread > BUSY_SPREAD:
        found.append(f"the same plain step took times that differ by {spread:.0%}")
    return " and ".join(found)


def _check(
    decoder: SpeculativeDecoder,
    plan: Plan,
    prompts: Sequence[Tensor],
    temperature: float,
    new_tokens: int,
    baselines: tuple[str, str | None, str | None],
    log: Console,
) -> dict[str, object]:
    """Predicted beside measured, at one temperature."""
    sampling, stop = SamplingOptions(temperature=temperature), StopOptions(max_new_tokens=new_tokens)
    target, dtypes, device = baselines
    methods = plain_baselines(decoder, target, dtypes, sampling, stop, 0, device)
    ours = next(iter(methods))  # our loop in the decoder's dtype
    with Progress(console=log, transient=True) as bar:
        task = bar.add_task(f"checking at temperature {temperature:g}", total=len(prompts))
        result = compare(
            planned(decoder, plan, greedy=sampling.greedy),
            prompts,
            methods,
            sampling=sampling,
            stop=stop,
            progress=lambda done: bar.update(task, completed=done),
        )
    totals = [g.totals for g in result.generations]
    promised = plan.menu(greedy=sampling.greedy).planned
    tau = sum(t.tokens for t in totals) / sum(t.target_passes for t in totals)
    fastest = result.fastest()
    return {
        "temperature": temperature,
        "predicted": asdict(promised),
        "tau": tau,
        "tau_ratio": tau / promised.tau,
        "speedup": result.speedup(ours),
        "speedup_interval_95": result.interval(ours),
        "speedup_ratio": result.speedup(ours) / promised.speedup,
        "fastest_plain": fastest,
        "speedup_over_fastest": result.speedup(fastest),
    }


def _show(plan: Plan, checks: Sequence[dict[str, object]]) -> None:
    console = Console(highlight=False)
    table = Table("temperature", "draft", "tau", "nodes", "over plain decoding")

    def rows(at: str, menu: Menu) -> None:
        for name, p in (("the planner", menu.planned), *menu.fixed):
            table.add_row(at, name, f"{p.tau:.2f}", f"{p.nodes:.1f}", f"{p.speedup:.2f}x")

    rows("0", plan.greedy)
    rows(f"{plan.temperature:g}", plan.sampled)
    console.print(table)
    for at, menu in (("0", plan.greedy), (f"{plan.temperature:g}", plan.sampled)):
        if menu.planned.speedup <= 1:
            console.print(f"At temperature {at} drafting does not pay here: the planner decodes plainly and retries.")
    for c in checks:
        predicted = c["predicted"]
        assert isinstance(predicted, dict)
        console.print(
            f"temperature {c['temperature']:g}: tau {predicted['tau']:.2f} predicted, {c['tau']:.2f} measured "
            f"(ratio {c['tau_ratio']:.2f}); speed-up {predicted['speedup']:.2f}x predicted, {c['speedup']:.2f}x "
            f"measured (ratio {c['speedup_ratio']:.2f}); over the fastest plain decoding ({c['fastest_plain']}) "
            f"{c['speedup_over_fastest']:.2f}x"
        )


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
