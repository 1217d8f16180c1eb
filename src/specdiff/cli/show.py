"""How generated text and its summary look on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdiff.decoder import Generation, Piece

STYLES = {"accepted": "green", "recovered": "yellow", "bonus": "cyan"}


def stream_to(console: Console, pieces: Iterable[Piece]) -> Generation:
    """Print pieces as they come; return the finished generation."""
    generation: Generation | None = None
    for piece in pieces:
        for span in piece.spans:
            console.print(Text(span.text, style=STYLES[span.kind]), end="", soft_wrap=True)
        generation = piece.generation or generation
    console.print()
    assert generation is not None, "a stream ends with its generation"
    return generation


def print_summary(console: Console, generation: Generation, seconds: float) -> None:
    """Accepted tokens, tau and speed, with the colour legend."""
    t = generation.totals
    legend = Text.assemble(
        (f"{t.accepted} accepted", STYLES["accepted"]),
        " + ",
        (f"{t.recovered} recovered", STYLES["recovered"]),
        " + ",
        (f"{t.bonus} bonus", STYLES["bonus"]),
        f" = {t.tokens} tokens in {t.rounds} target passes",
    )
    console.print(legend)
    rules = ", ".join(f"{rule} x{count}" for rule, count in t.rules.items())
    console.print(
        f"tau {t.tau:.2f} with the extra token, {t.accepted_per_round:.2f} without; {t.tokens / seconds:.1f} tokens/s; "
        f"draft {t.draft_seconds:.2f} s, target {t.target_seconds:.2f} s, rest {t.verify_seconds:.2f} s; "
        f"rule {rules}; finished by {generation.finish.value}"
    )


def folding_table() -> Table:
    """A table of names and values, whose values are folded where the terminal is narrow: no hash is cut short."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table
