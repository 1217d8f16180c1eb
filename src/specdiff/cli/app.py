"""The ``specdiff`` command."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import typer
from rich.console import Console

from specdiff import __version__
from specdiff.cli.lazy import LazyGroup, Place
from specdiff.errors import SpecdiffError


class Commands(LazyGroup):
    """Every command, in the order of the help."""

    places = {  # noqa: RUF012 - read only
        "generate": Place("specdiff.cli.generate", "generate", "Generate text, from a prompt, a file or stdin."),
        "chat": Place("specdiff.cli.chat", "chat", "Chat on the terminal."),
        "doctor": Place("specdiff.cli.doctor", "doctor", "Examine versions, devices, speed, memory and models."),
        "profile": Place("specdiff.cli.profile", "profile", "Where a round's time goes: target, drafter and rest."),
        "distill": Place("specdiff.cli.distill", "distill", "Cut a denoiser out of a target and train it."),
        "distill-eagle": Place("specdiff.cli.distill_eagle", "distill_eagle", "Train an EAGLE head, the baseline."),
        "tune": Place("specdiff.cli.tune", "tune_", "Measure what rounds cost, for --controller planner."),
        "reason": Place("specdiff.cli.reason", "reason_", "Think until the time is over, then answer."),
        "reason-study": Place("specdiff.cli.reason", "reason_study", "Accuracy against a budget of seconds."),
        "scale": Place("specdiff.cli.scale", "scale", "Project speed-ups for sizes that were not measured."),
        "models": Place("specdiff.cli.models", "app", "Models that can be fetched by name, and what is here."),
        "corpus": Place("specdiff.cli.corpus", "app", "Answers of a target to many prompts, to align drafters with."),
        "repro": Place("specdiff.cli.repro", "app", "The papers' tables and figures at this machine's scale."),
        "ngram": Place("specdiff.cli.ngram", "app", "N-gram models over token ids, for the path search of drafts."),
    }


app = typer.Typer(
    name="specdiff",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Lossless speculative decoding with diffusion drafters.",
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        print(f"specdiff {__version__}")
        raise typer.Exit


def _warn(message: Warning | str, *_: object) -> None:
    """Show a warning as one line, as errors are."""
    Console(stderr=True, highlight=False).print(f"warning: {message}", style="yellow", markup=False, soft_wrap=True)


def main() -> None:
    """Entry point: known errors become one clear line and exit code 2."""
    warnings.showwarning = _warn
    try:
        app()
    except SpecdiffError as error:
        # one line, however wide the terminal: messages are searched for
        Console(stderr=True, highlight=False).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)
