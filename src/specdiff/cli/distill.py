"""``specdiff distill``: align a drafter to a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specdiff.cli import options as o
from specdiff.cli.models import print_json
from specdiff.distill.recipe import Recipe
from specdiff.distill.run import prepare
from specdiff.errors import InputError
from specdiff.hub import ModelStore
from specdiff.models.load_target import load_target


def distill(
    output: Annotated[Path, typer.Argument(help="Folder of the run; one that was begun there is continued.")],
    corpus: Annotated[
        list[str], typer.Option("--corpus", help="FOLDER or FOLDER:WEIGHT of the target's answers; may be repeated.")
    ],
    target: o.Target = "smollm2-135m",
    layers: Annotated[
        str | None, typer.Option("--layers", help="Target layers to start from: 0-5 or 0,2,4; default the first fifth.")
    ] = None,
    feature_layers: Annotated[
        str, typer.Option("--feature-layers", help="Target layers whose hidden states it reads, such as 9,19,29.")
    ] = "",
    window: Annotated[int, typer.Option("--window", help="Tokens drafted in one pass.")] = Recipe.window,
    draft_vocab_size: Annotated[
        int, typer.Option("--draft-vocab", help="Tokens it may propose.")
    ] = Recipe.draft_vocab_size,
    objective: Annotated[str, typer.Option("--objective", help="What is minimised.")] = Recipe.objective,
    parameter: Annotated[
        list[str] | None, typer.Option("--parameter", help="NAME=VALUE of the objective; may be repeated.")
    ] = None,
    start_from: Annotated[Path | None, typer.Option("--start-from", help="An exported denoiser to go on from.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="bf16 or fp32.")] = Recipe.dtype,
    device: o.Device = None,
    steps: Annotated[int, typer.Option("--steps", help="Of the optimiser.")] = Recipe.steps,
    rows: Annotated[int, typer.Option("--rows", help="Answers of a batch.")] = Recipe.rows,
    anchors: Annotated[int, typer.Option("--anchors", help="Windows of an answer.")] = Recipe.anchors,
    accumulate: Annotated[int, typer.Option("--accumulate", help="Batches of a step.")] = Recipe.accumulate,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Peak.")] = Recipe.learning_rate,
    warmup: Annotated[float, typer.Option("--warmup", help="Share of the steps spent rising.")] = Recipe.warmup,
    weight_decay: Annotated[float, typer.Option("--weight-decay")] = Recipe.weight_decay,
    ema_decay: Annotated[
        float, typer.Option("--ema-decay", help="Of the averaged weights; 0 = none.")
    ] = Recipe.ema_decay,
    held_out: Annotated[
        int, typer.Option("--held-out", help="Prompts kept out of training, to measure on.")
    ] = Recipe.held_out,
    evaluate_tokens: Annotated[
        int, typer.Option("--evaluate-tokens", help="Decoded of each; 0 = replay temperature-0 answers only.")
    ] = Recipe.evaluate_tokens,
    nodes: Annotated[int, typer.Option("--nodes", help="Of the tree that is measured.")] = Recipe.nodes,
    checkpoint_minutes: Annotated[float, typer.Option("--checkpoint-minutes")] = 10.0,
    evaluate_minutes: Annotated[float, typer.Option("--evaluate-minutes")] = 20.0,
    fuse: Annotated[
        bool, typer.Option("--fuse", help="Compile norms and MLPs; pays on CPUs after a minute.")
    ] = Recipe.fuse,
    seed: o.Seed = 0,
    name: Annotated[str, typer.Option("--name", help="Label of the drafter.")] = "denoiser",
    allow_other_model: Annotated[
        bool, typer.Option("--allow-other-model", help="Take answers of another model with the same tokenizer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout at the end.")] = False,
) -> None:
    """Cut a block-causal denoiser out of a target and train it on the target's answers.

    After a crash, a kill or Ctrl-C the same command goes on from the last checkpoint.
    """
    recipe = Recipe(
        layers=None if layers is None else parse_layers("--layers", layers),
        feature_layers=parse_layers("--feature-layers", feature_layers) if feature_layers else (),
        window=window,
        draft_vocab_size=draft_vocab_size,
        objective=objective,
        parameters=dict(parse_parameter(item) for item in parameter or ()),
        dtype=dtype,
        steps=steps,
        rows=rows,
        anchors=anchors,
        accumulate=accumulate,
        learning_rate=learning_rate,
        warmup=warmup,
        weight_decay=weight_decay,
        ema_decay=ema_decay,
        held_out=held_out,
        evaluate_tokens=evaluate_tokens,
        nodes=nodes,
        fuse=fuse,
        seed=seed,
    )
    log = Console(stderr=True, highlight=False, quiet=as_json)
    where = ModelStore().resolve(target, pull=True)
    loaded, tokenizer = load_target(where.source, dtype=dtype, device=device or "cpu")
    trainer = prepare(
        recipe,
        output,
        loaded,
        tokenizer,
        [parse_corpus(item) for item in corpus],
        start_from=start_from,
        allow_other_model=allow_other_model,
        name=name,
        checkpoint_minutes=checkpoint_minutes,
        evaluate_minutes=evaluate_minutes,
    )
    size = sum(p.numel() for p in trainer.denoiser.parameters()) / 1e6
    log.print(
        f"{size:.1f} M weights, {trainer.denoiser.draft_vocab.numel()} draft tokens; step {trainer.step} of {steps}; "
        f"curves in {output / 'metrics.jsonl'}"
    )
    trainer.run()
    export = output / "export" / ("ema" if ema_decay else "raw")
    if as_json:
        print_json({"drafter": str(export), "step": trainer.step, "steps": steps, "windows": trainer.windows})
    elif trainer.step < steps:
        log.print(f"stopped at step {trainer.step} of {steps}; the same command goes on from here", style="yellow")
    else:
        log.print(f"done: specdiff generate --target {target} --drafter {export}")


def parse_layers(name: str, text: str) -> tuple[int, ...]:
    """``0-5`` or ``0,2,4`` or both, in the order given.

    Raises:
        InputError: it is neither.
    """
    layers: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            layers += range(int(first), int(last) + 1) if dash else [int(first)]
    except ValueError:
        layers = []
    if not layers:
        raise InputError.of(name, expected="layers such as 0-5 or 0,2,4", got=text, remedy="count from 0")
    return tuple(layers)


def parse_corpus(text: str) -> tuple[Path, float]:
    """``FOLDER`` or ``FOLDER:WEIGHT``; a path that exists is never cut.

    Raises:
        InputError: the weight is no number.
    """
    path, colon, weight = text.rpartition(":")
    if not colon or Path(text).exists():
        return Path(text), 1.0
    try:
        return Path(path), float(weight)
    except ValueError:
        raise InputError.of(
            "--corpus", expected="FOLDER or FOLDER:WEIGHT", got=text, remedy="check the path, or give a number"
        ) from None


def parse_parameter(text: str) -> tuple[str, Any]:
    """``name=value``, the value as JSON where it is JSON.

    Raises:
        InputError: there is no ``=``.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError.of("--parameter", expected="NAME=VALUE", got=text, remedy="such as nodes=15")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
