"""``specdiff profile``: where a round's time goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import nn

from specdiff.bench import profile as bench
from specdiff.bench.profile import Part
from specdiff.cli import options as o
from specdiff.cli.generate import read_prompts, with_budget
from specdiff.decoder import load
from specdiff.errors import InputError
from specdiff.models.denoiser import BlockCausalDenoiser
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions


def profile(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads stdin.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Prompts: JSON lines or plain lines.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first prompts of the file.")] = None,
    target: o.Target = "smollm2-135m",
    drafter: o.Drafter = "default",
    rule: o.Rule = "auto",
    shape: o.ShapeText = None,
    gamma: o.Gamma = None,
    ngram: o.Ngram = None,
    steps: o.Steps = 1,
    order: o.Order = "left_to_right",
    family: o.Family = None,
    adapter: o.Adapter = None,
    refresh: o.Refresh = None,
    controller: o.Controller = "fixed",
    draft_temperature: o.DraftTemperature = 1.0,
    max_new_tokens: o.MaxNewTokens = 128,
    temperature: o.Temperature = 0.0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Decode prompts and split the time of the rounds into target, drafter and rest."""
    prompts = read_prompts(prompt, file, limit)
    sampling = SamplingOptions(temperature=temperature)
    decoder = load(
        target,
        drafter,
        dtype=dtype,
        device=device,
        ngram=ngram,
        steps=steps,
        order=order,
        family=family,
        adapter=adapter,
        refresh=refresh,
    )
    decoder = with_budget(
        decoder, rule, shape, gamma, draft_temperature, greedy=sampling.greedy, ngram=ngram, controller=controller
    )
    model = decoder.target.model  # type: ignore[attr-defined]
    result = bench.profile(
        decoder,
        [(model, "forward")],
        drafter_parts(decoder.drafter),
        [decoder.encode(p, chat=bool(decoder.tokenizer and decoder.tokenizer.chat_template)) for p in prompts],
        sampling=sampling,
        stop=StopOptions(max_new_tokens=max_new_tokens),
    )
    rounds = max(1, result.rounds)
    figures = {
        "rounds": result.rounds,
        "threads": torch.get_num_threads(),
        "tau": result.totals.tau,
        "round_ms": 1e3 * result.total / rounds,
        "target_ms": 1e3 * result.target / rounds,
        "drafter_ms": 1e3 * result.drafter / rounds,
        "rest_percent": 100 * result.rest,
        "path_search_percent": 100 * result.search / result.total,
        "target_passes_a_round": result.target_calls / rounds,
        "drafter_passes_a_round": result.drafter_calls / rounds,
    }
    if as_json:
        print(json.dumps(figures))
        return
    Console(highlight=False).print("\n".join(f"{name:<24}{value:.3f}" for name, value in figures.items()))


def drafter_parts(drafter: object) -> list[Part]:
    """What a drafter calls in its passes, found by walking its attributes.

    Raises:
        InputError: the drafter has no weights, so there is nothing to profile apart from the target.
    """
    found: list[Part] = []
    seen: set[int] = set()
    waiting = [drafter]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, BlockCausalDenoiser):  # its session calls the decoder and the head one by one
            found += [(item.decoder, "forward"), (item, "head")]
        elif isinstance(item, nn.Module):
            found.append((item, "forward"))
        elif type(item).__module__.startswith("specdiff") and hasattr(item, "__dict__"):
            waiting.extend(vars(item).values())
        elif isinstance(item, (list, tuple)):
            waiting.extend(item)
    if not found:
        raise InputError.of(
            "drafter",
            expected="a drafter with weights",
            got=getattr(drafter, "name", None),
            remedy="profile the default drafter, or a folder of weights",
        )
    return found
