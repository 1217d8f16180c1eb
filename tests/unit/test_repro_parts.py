"""The parts of ``specdiff repro``: files of rows, published numbers, sums, settings, reports, human text."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from specdiff.errors import InputError
from specdiff.repro import published
from specdiff.repro.human_text import library_rows, reference_rows, write_rows
from specdiff.repro.plots import Plot, available, draw
from specdiff.repro.prompts import read_tasks
from specdiff.repro.report import Line, Report, Table, write_report
from specdiff.repro.rows import RowFile
from specdiff.repro.settings import Setting
from specdiff.repro.summary import late, summarise
from specdiff.train.windows import read_rows
from support.tokenizing import byte_level

HEADER = {"settings": {"a": {"gamma": 4}}, "tokens": 8}


def row(prompt: str, tokens: int, seconds: float, **more: object) -> dict:
    return {
        "prompt": prompt, "tokens": list(range(tokens)), "seconds": seconds, "rounds": 2, "passes": 2, "accepted": 3,
        "asked_by_position": [2, 2], "accepted_by_position": [2, 1], "draft_seconds": 0.2, "denoise_seconds": 0.15,
        "target_seconds": 0.5, "verify_seconds": 0.1, **more,
    }  # fmt: skip


def test_a_kill_at_any_byte_loses_one_row_at_most(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    file = RowFile(whole, HEADER, {"commit": "x"})
    for n in range(3):
        file.add((f"p{n}", "a"), {"seconds": n})
    data = whole.read_bytes()
    for size in range(len(data) + 1):
        cut = tmp_path / "cut.jsonl"
        cut.write_bytes(data[:size])
        again = RowFile(cut, HEADER, {})
        complete = sum(b'"kind": "row"' in line for line in data[:size].split(b"\n")[:-1])
        assert len(again.rows) == complete
        for n in range(complete, 3):
            again.add((f"p{n}", "a"), {"seconds": n})
        assert RowFile(cut, HEADER, {}).rows == file.rows


def test_other_settings_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    RowFile(path, HEADER, {}).add(("p", "a"), {})
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"settings\.a\.gamma was 4, is 5"):
        RowFile(path, {"settings": {"a": {"gamma": 5}}, "tokens": 8}, {})
    assert path.read_bytes() == before
    for number, line in ((1, b"{}\n"), (2, b"[1]\n"), (2, b'{"kind": "row"}\n'), (2, b"no\n")):
        broken = [before.splitlines(keepends=True)[0], line] if number == 2 else [line]
        path.write_bytes(b"".join(broken))
        with pytest.raises(InputError, match=f"line {number}: expected a header"):
            RowFile(path, HEADER, {})


def test_published_numbers_are_numbers_or_unknown() -> None:
    data = json.loads(resources.files("specdiff.repro").joinpath("published.json").read_text())
    assert set(data) == {"diffuspec", "specdiff2"}
    count = 0
    for paper, parts in data.items():
        assert published.source(paper).startswith("arXiv ")
        for part, entries in parts.items():
            if part == "source":
                continue
            for entry, numbers in entries.items():
                for name, number in numbers.items():
                    assert number is None or (isinstance(number, int | float) and 0 < number < 1000)
                    assert published.value(paper, part, entry, name) == number
                    count += number is not None
    assert count > 30
    assert published.value("diffuspec", "ablation", "both", "speedup") == 3.08
    assert published.value("specdiff2", "figure9", "1", "speedup") is None


def test_sums_are_ratios_of_totals() -> None:
    plain = [row("a", 11, 10.0), row("b", 21, 10.0)]
    fast = [row("a", 11, 2.0), row("b", 21, 8.0)]
    found = summarise(fast, plain)
    assert found.speedup == pytest.approx((30 / 10) / (30 / 20))
    assert found.mean_of_ratios == pytest.approx((5 + 1.25) / 2)
    assert found.low is not None
    assert found.low <= found.speedup <= (found.high or 0)
    assert (found.tau, found.mat, found.same_text) == (8.0, 1.5, 2)
    assert found.acceptance == (1.0, 0.5)
    assert found.search_seconds == pytest.approx(0.05 / 2)
    assert summarise(fast[:1], plain[:1]).low is None
    assert late((1.0, 0.6, 0.4, 0.2)) == pytest.approx(0.3)
    assert late(()) == 0.0


def test_prompts_come_from_the_groups_in_turns(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    items = [{"id": f"{t}/{n}", "task": t, "prompt": f"{t} {n}"} for t in ("qa", "rag") for n in range(3)]
    path.write_text("".join(json.dumps(i) + "\n" for i in items))
    assert [p.id for p in read_tasks([path], 3)] == ["qa/0", "rag/0", "qa/1"]
    with pytest.raises(InputError, match="ids that differ"):
        read_tasks([path, path])
    with pytest.raises(InputError, match="expected a file"):
        read_tasks([])
    path.write_text('{"prompt": ""}\n')
    with pytest.raises(InputError, match="line 1"):
        read_tasks([path])


def test_settings_refuse_what_means_nothing() -> None:
    for bad in ({"controller": "best"}, {"gamma": 0}, {"temperature": -1}, {"draft_temperature": 0.0}):
        with pytest.raises(InputError, match="expected"):
            Setting(name="x", **bad)  # type: ignore[arg-type]


def report() -> Report:
    line = Line(key="both", label="CPS and ADL", ours={"speedup": 1.25, "tau": 2.0}, published={"speedup": None})
    plot = Plot(kind="bars", title="t", x_label="x", y_label="y", series={"here": [("a", 1.0)]},
                published={"paper": [("a", 2.0)]})  # fmt: skip
    return Report(study="s", source="p", tables=(Table(title="T", lines=(line,)),), measured=({},), plot=plot)


def test_reports_take_sentences_and_print_what_is_not_known(tmp_path: Path) -> None:
    write_report(report(), tmp_path)
    assert "| CPS and ADL | 1.25x | 2.00 | n/a |  |" in (tmp_path / "table.md").read_text()
    (tmp_path / "notes.json").write_text('{"both": "The window is shorter."}')
    write_report(report(), tmp_path)
    assert "The window is shorter." in (tmp_path / "table.md").read_text()
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["tables"][0]["lines"][0]["difference"] == "The window is shorter."
    (tmp_path / "notes.json").write_text('{"bot": "x"}')
    with pytest.raises(InputError, match="keys among both"):
        write_report(report(), tmp_path)


@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_figures_are_drawn(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    assert available()
    points = [(1.0, 2.0), (2.0, 3.0)] if kind == "lines" else [("a", 2.0), ("b", 3.0)]
    plot = Plot(kind=kind, title="t", x_label="x", y_label="y", series={"here": points}, published={"paper": points})  # type: ignore[arg-type]
    assert draw(plot, tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["f.png"]


def test_human_text_becomes_rows(tmp_path: Path) -> None:
    tokenizer = byte_level()
    source = tmp_path / "s.jsonl"
    items = [{"id": f"set/{n}", "prompt": "add", "reference": f"the fox {n}", "split": "train" if n else "test"}
             for n in range(4)]  # fmt: skip
    source.write_text("".join(json.dumps(i) + "\n" for i in items))
    rows = list(reference_rows(source, tokenizer, split="train", exclude_from=["set/3"]))
    assert [r.id for r in rows] == ["set/1", "set/2"]
    assert rows[0].ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(rows[0].ids[:-1]) == "the fox 1"
    folder = tmp_path / "lib"
    (folder / "test").mkdir(parents=True)
    (folder / "a.py").write_text("def add(a, b):\n    return a + b\n" * 8)
    (folder / "test" / "b.py").write_text("x = 1\n" * 50)
    pieces = list(library_rows(tokenizer, folder=folder, length=32))
    assert pieces
    assert all(p.id.startswith("library/a.py/") and len(p.prompt_ids) == 2 for p in pieces)
    assert tokenizer.decode([i for p in pieces for i in (*p.prompt_ids, *p.ids)]).startswith("def add")
    assert len(list(library_rows(tokenizer, folder=folder, length=32, limit=2))) == 2
    assert write_rows(tmp_path / "rows.jsonl", [*rows, *pieces]) == len(read_rows(tmp_path / "rows.jsonl"))
    with pytest.raises(InputError, match="at least one row"):
        write_rows(tmp_path / "none.jsonl", [])
    with pytest.raises(InputError, match="PREFIX/NUMBER"):
        list(reference_rows(source, tokenizer, exclude_from=["set"]))
    source.write_text('{"id": "x", "prompt": "y"}\n')
    with pytest.raises(InputError, match="line 1: expected an object with texts"):
        list(reference_rows(source, tokenizer))
    assert not (tmp_path / "none.jsonl").exists()
