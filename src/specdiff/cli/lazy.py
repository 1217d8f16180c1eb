"""Commands that are imported when they are run, so that ``--help`` and ``--version`` do not wait for torch."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True)
class Place:
    """Where a command is: an attribute of a module, a function or a `typer.Typer`; and its line in the help."""

    module: str
    attribute: str
    summary: str


class LazyGroup(TyperGroup):
    """A group over ``places``; shows their summaries, imports the one that is run."""

    places: dict[str, Place] = {}  # noqa: RUF012 - set by subclasses, never changed

    def list_commands(self, ctx: Any) -> list[str]:
        """Names, in the order of the help."""
        return list(self.places)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What stands for a command in the help; None where there is none of that name."""
        place = self.places.get(cmd_name)
        return None if place is None else TyperCommand(cmd_name, help=place.summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is run, imported."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load_command(name, self.places[name]), rest


def load_command(name: str, place: Place) -> Any:
    """Import a command."""
    found = getattr(importlib.import_module(place.module), place.attribute)
    holder = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    holder.callback()(lambda: None)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name)(found)
    if "transformers" in sys.modules:  # the weights' own bars would run through our output
        importlib.import_module("transformers.utils.logging").disable_progress_bar()
    group: Any = typer.main.get_command(holder)
    return group.commands[name]
