"""Prompts for the default drafter's corpora beyond grade-school math: code to complete, tasks, instructions.

Writes JSON lines (``id``, ``prompt``) from three sources: MBPP's train split as plain tasks and as function stubs with
a docstring and examples, functions of Python's standard library (PSF licence) as stubs with their docstrings, and
self-instruct's seed tasks. No prompt of a test set is read.

usage: python scripts/training_prompts.py --mbpp mbpp.jsonl --self-instruct self_instruct_seed.jsonl --out prompts.jsonl
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

import jsonl
from specdiff.files import write_text

_TASK = ("Write a python function to ", "Write a function to ", "Write a function that ", "Write a function which ")


def stub(function: ast.FunctionDef, doc: str) -> str:
    """A function's head and its docstring, as code to complete."""
    head = f"def {function.name}({ast.unparse(function.args)})"
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    body = textwrap.indent(f'"""{doc}\n"""', "    ")
    return f"{head}{returns}:\n{body}\n"


def functions(source: str) -> Iterator[ast.FunctionDef]:
    """Top-level functions of a module; none where it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    yield from (node for node in tree.body if isinstance(node, ast.FunctionDef))


def from_mbpp(row: dict) -> Iterator[dict]:
    """The task as it is, and as a stub with its tests as examples."""
    yield {"id": f"{row['id']}/plain", "prompt": row["prompt"]}
    name = row["test_list"][0].removeprefix("assert ").partition("(")[0]
    for function in functions(row["reference"].replace("\r\n", "\n")):
        if function.name != name:
            continue
        task = row["prompt"]
        for start in _TASK:
            task = task.removeprefix(start)
        lines = [f" {task[0].upper()}{task[1:]}"]
        for test in row["test_list"]:
            call, equal, value = test.removeprefix("assert ").partition("==")
            if equal:
                lines += [f">>> {call.strip()}", value.strip()]
        yield {"id": f"{row['id']}/stub", "prompt": stub(function, "\n".join(lines))}


def from_library(folder: Path, longest: int) -> Iterator[dict]:
    """Documented functions of the standard library; private modules, tests and installed packages left out."""
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        if any(part in {"test", "tests", "site-packages", "idlelib", "lib2to3"} for part in path.parts):
            continue
        for function in functions(path.read_text(encoding="utf-8", errors="ignore")):
            doc = ast.get_docstring(function)
            if doc and 40 <= len(doc) <= longest and doc.isascii() and not function.name.startswith("_"):
                yield {"id": f"stdlib/{name}/{function.name}", "prompt": stub(function, " " + doc.strip())}


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbpp", type=Path, required=True)
    parser.add_argument("--self-instruct", type=Path, required=True)
    parser.add_argument("--library", type=int, default=900, help="functions of the standard library, drawn at random")
    parser.add_argument("--longest", type=int, default=500, help="characters of a library function's docstring")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    rows = [p for row in jsonl.rows(o.mbpp) if row["split"] == "train" for p in from_mbpp(row)]
    rows += [{"id": row["id"], "prompt": row["prompt"]} for row in jsonl.rows(o.self_instruct)]
    library = {p["id"]: p for p in from_library(Path(sysconfig.get_path("stdlib")), o.longest)}
    generator = random.Random(o.seed)
    rows += generator.sample(list(library.values()), min(o.library, len(library)))
    generator.shuffle(rows)
    write_text(o.out, "".join(json.dumps(row) + "\n" for row in rows))
    kinds = {k: sum(k in row["id"] for row in rows) for k in ("/plain", "/stub", "stdlib/", "seed_task")}
    print(f"{len(rows)} prompts: {kinds}; the standard library has {len(library)} functions that fit")


if __name__ == "__main__":
    main()
