"""``specdiff chat``: a conversation on the terminal."""

from __future__ import annotations

import time

from rich.console import Console

from specdiff.cli import options as o
from specdiff.cli.generate import with_budget
from specdiff.cli.models import progress_bars
from specdiff.cli.show import print_summary, stream_to
from specdiff.decoder import load
from specdiff.errors import ContextOverflowError
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions


def chat(
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
    max_new_tokens: o.MaxNewTokens = 512,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = None,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    seed: o.Seed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    tf32: o.Tf32 = False,
) -> None:
    """Chat. /clear forgets the conversation, /quit (or Ctrl-D) ends it; Ctrl-C stops an answer."""
    console = Console(highlight=False)
    sampling = SamplingOptions(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    with progress_bars(Console(stderr=True)) as report:  # of a target that must be fetched first
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
            progress=report,
        )
    decoder = with_budget(
        decoder, rule, shape, gamma, draft_temperature, greedy=sampling.greedy, ngram=ngram, controller=controller
    )
    messages: list[dict[str, str]] = []
    while True:
        try:
            said = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if said == "/quit":
            return
        if said == "/clear":
            messages.clear()
            continue
        if not said:
            continue
        messages.append({"role": "user", "content": said})
        began = time.perf_counter()
        try:
            generation = stream_to(
                console,
                decoder.stream(
                    messages,
                    sampling=sampling,
                    stop=StopOptions(max_new_tokens=max_new_tokens),
                    seed=seed,
                    clock=time.perf_counter,
                ),
            )
        except KeyboardInterrupt:
            console.print("\n(stopped)")
            messages.pop()
            continue
        except ContextOverflowError as error:
            console.print(f"{error}; the conversation was cleared", style="red", markup=False)
            messages.clear()
            continue
        messages.append({"role": "assistant", "content": generation.text})
        print_summary(console, generation, time.perf_counter() - began)
