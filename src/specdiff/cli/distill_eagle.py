"""``specdiff distill-eagle``: train an EAGLE head for a target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specdiff.cli import options as o
from specdiff.cli.distill import parse_corpus
from specdiff.cli.models import print_json
from specdiff.distill.eagle import EagleRecipe, prepare_eagle
from specdiff.hub import ModelStore
from specdiff.models.load_target import load_target


def distill_eagle(
    output: Annotated[Path, typer.Argument(help="Folder of the run; one that was begun there is continued.")],
    corpus: Annotated[
        list[str] | None,
        typer.Option("--corpus", help="FOLDER or FOLDER:WEIGHT of the target's answers; may be repeated."),
    ] = None,
    answers: Annotated[
        list[str] | None,
        typer.Option("--answers", help="FILE or FILE:WEIGHT of bare rows: id, prompt_ids, ids; nothing says whose."),
    ] = None,
    target: o.Target = "smollm2-135m",
    bias: Annotated[bool, typer.Option("--bias/--no-bias", help="Of the projection.")] = EagleRecipe.bias,
    dtype: Annotated[str, typer.Option("--dtype", help="bf16 or fp32.")] = EagleRecipe.dtype,
    device: o.Device = None,
    steps: Annotated[int, typer.Option("--steps", help="Of the optimiser.")] = EagleRecipe.steps,
    rows: Annotated[int, typer.Option("--rows", help="Answers of a batch.")] = EagleRecipe.rows,
    accumulate: Annotated[int, typer.Option("--accumulate", help="Batches of a step.")] = EagleRecipe.accumulate,
    positions: Annotated[
        int, typer.Option("--positions", help="Of a batch, for the classification loss; 0 = all.")
    ] = EagleRecipe.positions,
    noise: Annotated[float, typer.Option("--noise", help="Width of the noise on features.")] = EagleRecipe.noise,
    weight: Annotated[float, typer.Option("--weight", help="Of the classification loss.")] = EagleRecipe.weight,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Peak.")] = EagleRecipe.learning_rate,
    warmup: Annotated[float, typer.Option("--warmup", help="Share of the steps spent rising.")] = EagleRecipe.warmup,
    weight_decay: Annotated[float, typer.Option("--weight-decay")] = EagleRecipe.weight_decay,
    ema_decay: Annotated[
        float, typer.Option("--ema-decay", help="Of the averaged weights; 0 = none.")
    ] = EagleRecipe.ema_decay,
    held_out: Annotated[
        int, typer.Option("--held-out", help="Prompts kept out of training, to measure on.")
    ] = EagleRecipe.held_out,
    evaluate_tokens: Annotated[
        int, typer.Option("--evaluate-tokens", help="Decoded of each; 0 = do not measure.")
    ] = EagleRecipe.evaluate_tokens,
    checkpoint_minutes: Annotated[float, typer.Option("--checkpoint-minutes")] = 10.0,
    evaluate_minutes: Annotated[float, typer.Option("--evaluate-minutes")] = 20.0,
    seed: o.Seed = 0,
    name: Annotated[str, typer.Option("--name", help="Label of the head.")] = "eagle",
    allow_other_model: Annotated[
        bool, typer.Option("--allow-other-model", help="Take answers of another model with the same tokenizer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout at the end.")] = False,
) -> None:
    """Train an EAGLE head (a baseline) on a target's answers.

    After a crash, a kill or Ctrl-C the same command goes on from the last checkpoint.
    """
    recipe = EagleRecipe(
        bias=bias,
        dtype=dtype,
        steps=steps,
        rows=rows,
        accumulate=accumulate,
        positions=positions,
        noise=noise,
        weight=weight,
        learning_rate=learning_rate,
        warmup=warmup,
        weight_decay=weight_decay,
        ema_decay=ema_decay,
        held_out=held_out,
        evaluate_tokens=evaluate_tokens,
        seed=seed,
    )
    log = Console(stderr=True, highlight=False, quiet=as_json)
    where = ModelStore().resolve(target, pull=True)
    loaded, tokenizer = load_target(where.source, dtype=dtype, device=device or "cpu")
    trainer = prepare_eagle(
        recipe,
        output,
        loaded,
        tokenizer,
        [parse_corpus(item) for item in corpus or ()],
        answers=[parse_corpus(item) for item in answers or ()],
        allow_other_model=allow_other_model,
        name=name,
        checkpoint_minutes=checkpoint_minutes,
        evaluate_minutes=evaluate_minutes,
    )
    size = sum(p.numel() for p in trainer.head.parameters()) / 1e6
    log.print(f"{size:.1f} M weights; step {trainer.step} of {steps}; curves in {output / 'metrics.jsonl'}")
    trainer.run()
    export = output / "export" / ("ema" if ema_decay else "raw")
    if as_json:
        print_json({"drafter": str(export), "step": trainer.step, "steps": steps, "tokens": trainer.tokens})
    elif trainer.step < steps:
        log.print(f"stopped at step {trainer.step} of {steps}; the same command goes on from here", style="yellow")
    else:
        log.print(f"done: specdiff generate --target {target} --drafter {export} --shape dynamic:60 --gamma 6")
