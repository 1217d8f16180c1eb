"""A file of measurements that survives kills: a header that freezes what is measured, then a line a row.

A kill loses the row that was being made, and no other. Going on with other settings, prompts or machine is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdiff.corpus.manifest import differences
from specdiff.errors import InputError

Key = tuple[str, str]
"""(id of the prompt, name of the setting)."""


class RowFile:
    """Rows by prompt and setting.

    Args:
        path: JSON lines; made if it is not there. header: what is measured, as plain data. about: of this run.

    Attributes:
        rows: those that are there, by key. runs: what each run said of itself, this one last once it has added a row.

    Raises:
        InputError: the file holds another measurement, or a line that is none.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self.path, self.header = path, json.loads(json.dumps(header))
        self.rows: dict[Key, dict[str, Any]] = {}
        self.runs: list[dict[str, Any]] = []
        self._about, self._told = dict(about), False
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._read()
        if not path.exists() or not path.stat().st_size:
            self._append({"kind": "header", "header": self.header})

    def add(self, key: Key, row: Mapping[str, Any]) -> None:
        """Write one row, so that it is on the disk when this returns."""
        assert key not in self.rows, "a row is measured once"
        if not self._told:
            self._told = True
            self.runs.append(self._about)
            self._append({"kind": "run", "about": self._about})
        value = {"prompt": key[0], "setting": key[1], **row}
        self._append({"kind": "row", **value})
        self.rows[key] = value

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # a kill in the middle of a line
            with self.path.open("r+b") as file:
                file.truncate(whole)
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                item = json.loads(line)
                kind = item.pop("kind")
                if (kind == "header") != (number == 1):
                    raise ValueError(kind)
                if kind == "header":
                    self._check(item["header"])
                elif kind == "run":
                    self.runs.append(item["about"])
                elif kind == "row":
                    self.rows[item["prompt"], item["setting"]] = item
                else:
                    raise ValueError(kind)
            except InputError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError.of(
                    f"{self.path}, line {number}", expected="a header, then runs and rows", got=line[:60],
                    remedy="restore the file, or choose another folder",
                ) from error  # fmt: skip

    def _check(self, present: Any) -> None:
        found = [f"{name} was {then!r}, is {now!r}" for name, then, now in differences(present, self.header)]
        if found:
            raise InputError(
                f"{self.path}: expected the settings this measurement was begun with, got others "
                f"({'; '.join(found[:6])}); go on with the same ones, or choose another folder with --out"
            )

    def _append(self, value: Mapping[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(value).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
