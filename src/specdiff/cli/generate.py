"""``specdiff generate``: a prompt, a file of prompts or stdin; streaming, comparing, or JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specdiff.bench.compare import Comparison, Method, compare, plain_loop, transformers_generate
from specdiff.bench.tune import with_plan
from specdiff.cli import options as o
from specdiff.cli.models import progress_bars
from specdiff.cli.show import print_summary, stream_to
from specdiff.control import registry as controllers
from specdiff.control.defaults import default_budget
from specdiff.decoder import Generation, Settings, SpeculativeDecoder, load
from specdiff.errors import InputError
from specdiff.sampling import SamplingOptions
from specdiff.shapes import parse_shape
from specdiff.stopping import StopOptions
from specdiff.types import Budget, CausalPaths


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads stdin.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Prompts: JSON lines with a 'prompt' field, or one prompt a line.")
    ] = None,
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
    max_new_tokens: o.MaxNewTokens = 256,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = None,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    stop: o.Stop = None,
    seed: o.Seed = 0,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Wrap prompts in the chat template.")] = False,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    tf32: o.Tf32 = False,
    compare_: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also decode plainly (our loop and transformers' generate) in this process; print the ratio.",
        ),
    ] = False,
    compare_dtypes: Annotated[
        str | None,
        typer.Option("--compare-dtypes", help="With --compare: plain decoding in these dtypes too, e.g. bf16,fp32."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One JSON object a prompt on stdout (with --compare: one in all), nothing else."),
    ] = False,
    color: Annotated[
        bool | None,
        typer.Option(
            "--color/--no-color",
            help="Mark tokens by kind; default: on terminals.",
        ),
    ] = None,
) -> None:
    """Generate text. Accepted, recovered and bonus tokens are told apart by colour where the terminal allows."""
    if compare_dtypes and not compare_:
        raise InputError.of(
            "--compare-dtypes", expected="--compare beside it", got=compare_dtypes, remedy="add --compare"
        )
    if limit is not None and (limit < 1 or file is None):
        raise InputError.of("--limit", expected=">= 1, with --file", got=limit, remedy="give --file, or leave it out")
    prompts = read_prompts(prompt, file, limit)
    sampling = SamplingOptions(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    stops = StopOptions(max_new_tokens=max_new_tokens, stop_strings=stop or ())
    log = Console(stderr=True, highlight=False, quiet=as_json)
    with progress_bars(log) as report:  # of a target that must be fetched first
        decoder = load(
            target,
            drafter,
            dtype=dtype,
            device=device,
            tf32=tf32,
            ngram=ngram,
            steps=steps,
            order=order,
            family=family,
            adapter=adapter,
            refresh=refresh,
            settings=Settings(rule=rule),
            progress=report,
        )
    decoder = with_budget(
        decoder, rule, shape, gamma, draft_temperature, greedy=sampling.greedy, ngram=ngram, controller=controller
    )
    out = Console(highlight=False, force_terminal=True if color else None, no_color=True if color is False else None)
    if not compare_ or (len(prompts) == 1 and not as_json):  # a single prompt is shown, then compared
        for index, text in enumerate(prompts):
            began = time.perf_counter()
            pieces = decoder.stream(text, sampling=sampling, stop=stops, seed=seed, chat=chat, clock=time.perf_counter)
            if as_json:
                generation = next(p.generation for p in pieces if p.generation is not None)
                print(json.dumps(to_json(index, text, generation, time.perf_counter() - began)), flush=True)
            else:
                generation = stream_to(out, pieces)
                print_summary(log, generation, time.perf_counter() - began)
    if compare_:
        baselines = plain_baselines(decoder, target, compare_dtypes, sampling, stops, seed, device)
        ids = [decoder.encode(p, chat=chat) for p in prompts]
        with Progress(console=log, transient=True) as bar:
            task = bar.add_task("comparing with plain decoding", total=len(ids))
            result = compare(
                decoder,
                ids,
                baselines,
                sampling=sampling,
                stop=stops,
                seed=seed,
                progress=lambda done: bar.update(task, completed=done),
            )
        _print_comparison(result, prompts, greedy=sampling.greedy, as_json=as_json)


def with_budget(
    decoder: SpeculativeDecoder,
    rule: str,
    shape: str | None,
    gamma: int | None,
    draft_temperature: float,
    *,
    greedy: bool,
    ngram: str | None = None,
    controller: str = "fixed",
) -> SpeculativeDecoder:
    """The decoder with the budget that the shape options describe, and the controller of that name.

    Raises:
        InputError: an option that could only be ignored: one of drafts without a drafter, an n-gram model (``ngram``)
            for a shape that asks none, any beside the planner; or there is no such controller, or no plan.
    """
    if controller.partition(":")[0] == "planner":
        asked = {"--shape": shape, "--gamma": gamma, "--ngram": ngram}
        asked["--draft-temperature"] = None if draft_temperature == 1.0 else draft_temperature
        for name, value in asked.items():
            if value is not None:
                raise InputError.of(
                    name, expected="no such option beside --controller planner", got=value, remedy="it chooses itself"
                )
        path = controller.partition(":")[2]
        return with_plan(decoder, greedy=greedy, path=Path(path) if path else None)
    chosen_controller = controllers.get(controller)
    if decoder.drafter is None:
        asked = {"--rule": rule != "auto", "--shape": shape is not None, "--gamma": gamma is not None}
        asked["--controller"] = controller != "fixed"
        for name in (n for n, given in asked.items() if given):
            raise InputError.of(name, expected="a drafter", got="--drafter none", remedy="leave one of them out")
    base = default_budget(decoder.drafter, greedy=greedy, gamma=gamma)
    chosen = parse_shape(shape) if shape else base.shape
    if ngram is not None and not (isinstance(chosen, CausalPaths) and chosen.weight < 1):
        raise InputError.of(
            "--ngram", expected="--shape paths of weight < 1 beside it", got=shape, remedy="add --shape paths:3"
        )
    budget = Budget(gamma=base.gamma, shape=chosen, temperature=draft_temperature)
    settings = Settings(rule=rule, budget=budget, controller=chosen_controller)
    return SpeculativeDecoder(decoder.target, decoder.drafter, decoder.tokenizer, settings)


def read_prompts(prompt: str | None, file: Path | None, limit: int | None) -> list[str]:
    """Prompts from the argument, a file or stdin.

    Raises:
        InputError: both or neither given, a missing file, a broken line (named by number), no prompts.
    """
    if file is None:
        text = sys.stdin.read() if prompt in (None, "-") else prompt
        assert text is not None
        return [text]
    if prompt is not None:
        raise InputError.of("prompt", expected="either a prompt or --file", got="both", remedy="drop one")
    if not file.is_file():
        raise InputError.of("--file", expected="a readable file", got=str(file), remedy="check the path")
    prompts: list[str] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        if file.suffix == ".jsonl":
            try:
                prompts.append(json.loads(line)["prompt"])
            except (ValueError, KeyError, TypeError) as error:
                raise InputError.of(
                    f"{file.name} line {number}",
                    expected="a JSON object with a 'prompt' field",
                    got=line[:80],
                    remedy="fix or remove the line",
                ) from error
        else:
            prompts.append(line)
        if limit is not None and len(prompts) == limit:
            break
    if not prompts:
        raise InputError.of("--file", expected="at least one prompt", got=str(file), remedy="check the file")
    return prompts


def to_json(index: int, prompt: str, generation: Generation, seconds: float) -> dict[str, object]:
    """One result as plain data."""
    return {
        "index": index,
        "prompt": prompt,
        "text": generation.text,
        "tokens": list(generation.tokens),
        "prompt_tokens": generation.prompt_tokens,
        "finish": generation.finish.value,
        "seconds": seconds,
        "totals": asdict(generation.totals),
    }


def plain_baselines(
    decoder: SpeculativeDecoder,
    target: str,
    dtypes: str | None,
    sampling: SamplingOptions,
    stop: StopOptions,
    seed: int,
    device: str | None,
) -> dict[str, Method]:
    """Plain decoding by our loop and by transformers, in the decoder's dtype and in those named (``bf16,fp32``)."""
    methods: dict[str, Method] = {}
    plain = SpeculativeDecoder(decoder.target, None, decoder.tokenizer)
    for dtype in [None, *(dtypes or "").split(",")] if dtypes else [None]:
        if dtype is not None:
            plain = load(target, "none", dtype=dtype, device=device)
        model = plain.target.model  # type: ignore[attr-defined]
        name = str(model.dtype).removeprefix("torch.")
        methods.setdefault(f"plain loop, {name}", plain_loop(plain, sampling, stop, seed))
        methods.setdefault(f"transformers generate, {name}", transformers_generate(model, sampling, stop))
    return methods


def _print_comparison(result: Comparison, prompts: Sequence[str], *, greedy: bool, as_json: bool) -> None:
    fastest = result.fastest()
    if as_json:
        print(
            json.dumps(
                {
                    "prompts": len(prompts),
                    "threads": torch.get_num_threads(),
                    "fastest_plain": fastest,
                    "speedup": result.speedup(fastest),
                    "interval_95": result.interval(fastest),
                    "tokens_per_second": {m: result.rate(m) for m in result.seconds},
                    "seconds": {m: list(s) for m, s in result.seconds.items()},
                    "tokens": {m: list(t) for m, t in result.tokens.items()},
                    "parted": {m: list(p) for m, p in result.parted.items()},
                    "totals": [asdict(g.totals) for g in result.generations],
                }
            )
        )
        return
    console = Console(highlight=False)
    table = Table(
        "method",
        "tokens/s",
        "specdiff is faster by",
        title=f"{len(prompts)} prompt{'s' if len(prompts) > 1 else ''}, {torch.get_num_threads()} thread(s)",
    )
    for method in result.seconds:
        ratio = "" if method == "specdiff" else f"{result.speedup(method):.2f}x"
        table.add_row(method, f"{result.rate(method):.1f}", ratio)
    console.print(table)
    interval = ""
    if len(prompts) > 1:
        low, high = result.interval(fastest)
        interval = f" (95 % {low:.2f} to {high:.2f} over prompts)"
    speedup = result.speedup(fastest)
    console.print(f"speed-up over the fastest plain decoding ({fastest}): {speedup:.2f}x{interval}")
    totals = [g.totals for g in result.generations]
    tau = sum(t.tokens for t in totals) / sum(t.target_passes for t in totals)
    console.print(f"tau {tau:.2f} tokens a target pass, extra token included")
    if greedy:
        for method, places in result.parted.items():
            console.print(f"{agreement(places)} {method}")
        if any(place is not None for places in result.parted.values() for place in places):
            console.print(
                "Texts part where rounding decides between nearly equal logits: often in bf16, hardly in fp32."
            )


def agreement(places: Sequence[int | None]) -> str:
    """How often a baseline's text was the same."""
    if all(place is None for place in places):
        return "the same text as"
    if len(places) == 1:
        return f"the same text up to token {places[0]} as"
    return f"the same text on {places.count(None)} of {len(places)} prompts as"
