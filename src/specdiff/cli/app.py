"""The ``specdiff`` command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from transformers.utils import logging

from specdiff import __version__
from specdiff.cli import chat, corpus, distill, distill_eagle, doctor, generate, models, ngram, profile, tune
from specdiff.errors import SpecdiffError

app = typer.Typer(
    name="specdiff",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Lossless speculative decoding with diffusion drafters.",
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("doctor")(doctor.doctor)
app.command("profile")(profile.profile)
app.command("distill")(distill.distill)
app.command("distill-eagle")(distill_eagle.distill_eagle)
app.command("tune")(tune.tune_)
app.add_typer(models.app, name="models")
app.add_typer(corpus.app, name="corpus")
app.add_typer(ngram.app, name="ngram")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        print(f"specdiff {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: known errors become one clear line and exit code 2."""
    logging.disable_progress_bar()  # the weights' own bars would run through our output
    try:
        app()
    except SpecdiffError as error:
        # one line, however wide the terminal: messages are searched for
        Console(stderr=True, highlight=False).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)
