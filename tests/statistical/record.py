"""Which cases of the matrix have been run: a JSON-lines file that an interrupted proof goes on from."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
import transformers

import specdiff
from statistical.law import Case

_ROOTS = (Path(specdiff.__file__).parents[1], Path(__file__).parents[1])


@functools.cache
def loop_sources() -> tuple[Path, ...]:
    """Every source file of the package and the tests that a case can import, found by following import statements.

    Not every file under src: one that the loop cannot reach, a trainer say, leaves the law as it was.
    """
    found: set[Path] = set()
    names = ["statistical.law"]
    while names:
        parts = names.pop().split(".")
        for length in range(1, len(parts) + 1):  # importing a module runs the packages above it
            for path in filter(Path.is_file, _files(parts[:length])):
                if path not in found:
                    found.add(path)
                    names += _imported(ast.parse(path.read_bytes()))
    return tuple(sorted(found))


def _files(parts: list[str]) -> Iterator[Path]:
    for root in _ROOTS:
        yield root.joinpath(*parts, "__init__.py")
        yield root.joinpath(*parts[:-1], parts[-1] + ".py")


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)  # a module or what is in one
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from _imported(node)


def sources_hash() -> str:
    """Of the names and contents of `loop_sources` and the versions of what they compute with."""
    digest = hashlib.sha256()
    for module in (numpy, torch, transformers):
        digest.update(f"{module.__name__} {module.__version__}\n".encode())
    for path in loop_sources():
        digest.update(f"{path.parent.name}/{path.name} ".encode() + path.read_bytes() + b"\n")
    return digest.hexdigest()[:16]


class Record:
    """P-values by case; one line a case, appended as each one ends, so that processes can share the file.

    Args:
        path: JSON lines. sources: lines from other sources than these do not count; default: the present ones.
    """

    def __init__(self, path: Path, *, sources: str | None = None) -> None:
        self._path, self._sources = path, sources or sources_hash()
        self._known: dict[str, tuple[int, list[float]]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                if entry["sources"] == self._sources:
                    self._learn(entry["case"], entry["sequences"], entry["p_values"])

    def p_values(self, case: Case, sequences: int) -> list[float]:
        """Those on record for at least so many sequences; else the case is run, and recorded."""
        known = self._known.get(case.name)
        if known is not None and known[0] >= sequences:
            return known[1]
        values = case.p_values(sequences)
        entry = {"case": case.name, "sequences": sequences, "seed": case.seed, "p_values": values}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, "sources": self._sources}) + "\n")
        self._learn(case.name, sequences, values)
        return values

    def _learn(self, name: str, sequences: int, values: list[float]) -> None:
        if name not in self._known or self._known[name][0] <= sequences:
            self._known[name] = sequences, values
