"""``specdiff reason``: think against the clock, then answer; ``specdiff reason-study``: accuracy against budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from specdiff.bench.budgeted import INSTRUCTION, StudyOptions, read_questions, run_study
from specdiff.bench.budgeted_report import markdown, plot, summarise
from specdiff.cli import options as o
from specdiff.cli.generate import read_prompts, with_budget
from specdiff.cli.tune import device_clock
from specdiff.decoder import SpeculativeDecoder, load
from specdiff.errors import InputError
from specdiff.files import write_text
from specdiff.loading import load_drafter
from specdiff.models.tables import embedding_table
from specdiff.reasoning import Closing, reason
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions

_DEFAULT = Closing()
Instruction = Annotated[str, typer.Option("--closing", help="What the target is told when its time is over.")]
Opening = Annotated[str, typer.Option("--opening", help="How its answer begins.")]
AnswerTokens = Annotated[int, typer.Option("--answer-tokens", help="Most tokens of the answer.")]
Chat = Annotated[bool, typer.Option("--chat/--raw", help="Wrap prompt and closing in the chat template.")]
_KEYS = ("shape", "gamma", "rule", "draft-temperature", "controller", "steps", "ngram")


def reason_(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads stdin.")] = None,
    budget: Annotated[float, typer.Option("--budget", help="Seconds to think.")] = 15.0,
    target: o.Target = "smollm2-135m",
    drafter: o.Drafter = "default",
    rule: o.Rule = "auto",
    shape: o.ShapeText = None,
    gamma: o.Gamma = None,
    ngram: o.Ngram = None,
    controller: o.Controller = "fixed",
    draft_temperature: o.DraftTemperature = 1.0,
    max_new_tokens: o.MaxNewTokens = 2048,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = 0,
    closing: Instruction = _DEFAULT.instruction,
    opening: Opening = _DEFAULT.opening,
    answer_tokens: AnswerTokens = _DEFAULT.answer_tokens,
    chat: Chat = True,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")] = False,
) -> None:
    """Think for so many seconds, then be told to answer."""
    told = Closing(instruction=closing, opening=opening, answer_tokens=answer_tokens)
    sampling = SamplingOptions(temperature=temperature)
    StopOptions(max_new_tokens=max_new_tokens, max_time=budget)  # refused before anything is loaded
    text = read_prompts(prompt, None, None)[0]
    decoder = load(target, drafter, dtype=dtype, device=device, ngram=ngram)
    decoder = with_budget(
        decoder, rule, shape, gamma, draft_temperature, greedy=sampling.greedy, ngram=ngram, controller=controller
    )
    result = reason(
        decoder,
        text,
        budget=budget,
        closing=told,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        chat=chat,
        clock=device_clock(_device(decoder)),
    )
    thought = result.thought
    if as_json:
        print(
            json.dumps(
                {
                    "thought": thought.text,
                    "tokens": list(thought.tokens),
                    "finish": thought.finish.value,
                    "answer": result.answer.text,
                    "answer_tokens": list(result.answer.tokens),
                    "thought_seconds": result.thought_seconds,
                    "answer_seconds": result.answer_seconds,
                    "tau": thought.totals.tau,
                }
            )
        )
        return
    console = Console(highlight=False)
    console.print(thought.text, style="dim", markup=False)
    console.print(f"\n{opening}{result.answer.text}", markup=False)
    Console(stderr=True, highlight=False).print(
        f"thought {len(thought.tokens)} tokens in {result.thought_seconds:.2f} s (ended by {thought.finish.value}), "
        f"answered in {result.answer_seconds:.2f} s"
    )


def reason_study(
    file: Annotated[Path, typer.Argument(help="Questions: JSON lines with 'prompt' and a numeric 'answer'.")],
    out: Annotated[Path, typer.Option("--out", help="Rows, JSON lines; continued where it exists.")],
    budgets: Annotated[str, typer.Option("--budgets", help="Seconds, separated by commas.")] = "10,20,40,80",
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="NAME=DRAFTER, with @KEY=VALUE for each of shape, gamma, rule, draft-temperature, controller, steps, "
            "ngram, e.g. aligned=my_drafter@shape=samples:8. May be given several times; default: plain=none and "
            "aligned=default. Name them plain, unaligned and aligned to see the paper's figures beside yours.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first questions of the file.")] = None,
    target: o.Target = "smollm2-135m",
    max_new_tokens: o.MaxNewTokens = 2048,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = 0,
    instruction: Annotated[str, typer.Option("--instruction", help="Put behind each question.")] = INSTRUCTION,
    closing: Instruction = _DEFAULT.instruction,
    opening: Opening = _DEFAULT.opening,
    answer_tokens: AnswerTokens = _DEFAULT.answer_tokens,
    chat: Chat = True,
    report: Annotated[
        Path | None, typer.Option("--report", help="Base name of the .md, .json and .png; default: --out's.")
    ] = None,
    png: Annotated[bool, typer.Option("--png/--no-png", help="Plot it (needs specdiff[bench]).")] = True,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
) -> None:
    """Accuracy against a budget of seconds, every method on the same questions and clock."""
    options = StudyOptions(
        budgets=parse_numbers("--budgets", budgets),
        max_new_tokens=max_new_tokens,
        closing=Closing(instruction=closing, opening=opening, answer_tokens=answer_tokens),
        instruction=instruction,
        temperature=temperature,
        seed=seed,
        chat=chat,
    )
    if out.suffix != ".jsonl":
        raise InputError.of("--out", expected="a file name that ends in .jsonl", got=str(out), remedy="rename it")
    if limit is not None and limit < 1:
        raise InputError.of("--limit", expected="an integer >= 1", got=limit, remedy="leave it out for all")
    specs = [parse_method(text) for text in method or ["plain=none", "aligned=default"]]
    if len({name for name, _, _ in specs}) < len(specs):
        raise InputError.of("--method", expected="names that differ", got=method, remedy="rename one")
    questions = read_questions(file, limit=limit)
    plain = load(target, "none", dtype=dtype, device=device)
    methods = {name: _method(plain, drafter, keys, temperature == 0) for name, drafter, keys in specs}
    log = Console(stderr=True, highlight=False)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=log, transient=True) as bar:
        task = bar.add_task("thinking", total=None)
        rows = run_study(
            methods,
            questions,
            options,
            out,
            clock=device_clock(_device(plain)),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    found = summarise(rows)
    base = report or out
    write_text(base.with_suffix(".md"), markdown(found))
    write_text(base.with_suffix(".json"), json.dumps(found.to_dict(), indent=1) + "\n")
    if png:
        plot(found, base.with_suffix(".png"))
    print(markdown(found), end="")


def parse_numbers(name: str, text: str) -> tuple[float, ...]:
    """Read numbers > 0 separated by commas.

    Raises:
        InputError: there are none, or one is no such number.
    """
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < n < float("inf") for n in numbers):
        raise InputError.of(name, expected="numbers > 0 separated by commas", got=text, remedy="for example 10,20")
    return numbers


def parse_method(text: str) -> tuple[str, str, dict[str, str]]:
    """Read ``NAME=DRAFTER@KEY=VALUE...``; returns (name, drafter, keys).

    Raises:
        InputError: it is none, or a key is unknown or comes twice.
    """
    head, *rest = text.split("@")
    name, _, drafter = head.partition("=")
    keys = {key: value for key, _, value in (part.partition("=") for part in rest)}
    sound = name and drafter and all(k in _KEYS and v for k, v in keys.items()) and len(keys) == len(rest)
    if not sound:
        raise InputError.of(
            "--method",
            expected=f"NAME=DRAFTER with @KEY=VALUE of {', '.join(_KEYS)}",
            got=text,
            remedy="for example aligned=default@shape=best-first:16",
        )
    return name, drafter, keys


def _method(plain: SpeculativeDecoder, drafter: str, keys: dict[str, str], greedy: bool) -> SpeculativeDecoder:
    try:
        steps, temperature = int(keys.get("steps", "1")), float(keys.get("draft-temperature", "1"))
        gamma = int(keys["gamma"]) if "gamma" in keys else None
    except ValueError as error:
        raise InputError.of("--method", expected="numbers", got=keys, remedy="check its values") from error
    ngram = keys.get("ngram")
    other = load_drafter(drafter, plain.target, plain.tokenizer, steps=steps, ngram=ngram)
    return with_budget(
        SpeculativeDecoder(plain.target, other, plain.tokenizer),
        keys.get("rule", "auto"),
        keys.get("shape"),
        gamma,
        temperature,
        greedy=greedy,
        ngram=ngram,
        controller=keys.get("controller", "fixed"),
    )


def _device(decoder: SpeculativeDecoder) -> str:
    return embedding_table(decoder.target.model).device.type  # type: ignore[attr-defined]
