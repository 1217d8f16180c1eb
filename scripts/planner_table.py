"""The planner against the best fixed setting found by grid, data set by data set: one command, which can be stopped.

For each data set and temperature, every candidate and plain decoding take turns prompt by prompt (see `shapes`). One
JSON line a (data set, temperature, candidate, prompt) is appended to --out; a rerun continues. The table is printed at
the end.

usage: OMP_NUM_THREADS=1 python scripts/planner_table.py --data DIR --plan plan.json --out planner.jsonl
    (make the plan first: specdiff tune --again --check --check-dtypes bf16,fp32 --out plan.json)
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch

import jsonl
from shapes import PLAIN, PLANNER, interval, settings
from specdiff.bench.tune import identity
from specdiff.control.plan_file import load_plan
from specdiff.decoder import Generation, Settings, SpeculativeDecoder, load
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions

GRID = {
    0.0: [f"best-first:{n}/auto/1" for n in (2, 4, 6, 8, 10, 12, 16)],
    1.0: [
        *(f"best-first:{n}/auto/1" for n in (2, 4, 8, 12)),
        *(f"siblings:{w}/auto/1" for w in ("2", "2,1", "3,1,1", "4,1")),
        *(f"siblings:3,1,1/auto/{t}" for t in (0.7, 1.3)),
        *(f"chain/auto/1/{g}" for g in (1, 2, 4)),
    ],
}
LANGUAGES = (
    "Décris en détail une journée de pluie dans une petite ville au bord de la mer.",
    "Erkläre ausführlich, wie ein Segelboot gegen den Wind fahren kann.",
    "Cuenta una historia sobre un zapatero que encuentra una llave en el bosque.",
    "请详细介绍一下茶叶的历史和泡茶的方法。",
    "日本の四季と、それぞれの季節の行事について詳しく説明してください。",
)
WORDS = (
    "anvil basil cinder dowry ember fjord gimlet hazel inkwell jute kelp lintel mortar nettle osier plinth",
    "quartz rivet sedge tallow umber vellum wicket yarrow zinc barge cleft drizzle flint gourd husk loom moss",
)


def data_sets(folder: Path, count: int) -> dict[str, list[tuple[str, str]]]:
    """(id, prompt) of each: files of the folder as far as they are there, and texts that are hard to draft."""
    sets: dict[str, list[tuple[str, str]]] = {}
    for name in ("gsm8k_test", "mbpp", "humaneval"):
        if (folder / f"{name}.jsonl").exists():
            sets[name] = jsonl.prompts(str(folder / f"{name}.jsonl"), 0, count)
    bench = folder / "spec_bench.jsonl"
    if bench.exists():
        for line in bench.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            chosen = sets.setdefault(f"spec_bench {row['category']}", [])
            if len(chosen) < count:
                chosen.append((str(row["id"]), row["prompt"]))
    rng = random.Random(0)
    lists = [" ".join(rng.choices(" ".join(WORDS).split(), k=40)) for _ in range(5)]
    sets["random words"] = [
        (f"words-{i}", f"Continue this list of random words with a hundred more: {words}")
        for i, words in enumerate(lists)
    ]
    sets["other languages"] = [(f"language-{i}", text) for i, text in enumerate(LANGUAGES)]
    return sets


def report(rows: list[dict], temperatures: list[float]) -> None:
    """One line a data set and temperature."""
    names = list(dict.fromkeys(r["set"] for r in rows))
    for temperature in temperatures:
        for name in names:
            mine = [r for r in rows if r["set"] == name and r["temperature"] == temperature]
            by: dict[str, dict[str, dict]] = {}
            for r in mine:
                by.setdefault(r["candidate"], {})[r["id"]] = r
            if PLAIN not in by:
                continue
            found: dict[str, tuple[float, float, float]] = {}
            for candidate, own in by.items():
                shared = sorted(own.keys() & by[PLAIN].keys())
                if candidate != PLAIN and shared:
                    found[candidate] = interval([(own[k], by[PLAIN][k]) for k in shared], "tokens", "seconds")
            planner = found.pop(PLANNER, None)
            if planner is None or not found:
                continue
            best = max(found, key=lambda c: found[c][0])
            print(
                f"T {temperature:g}  {name:28} planner {planner[0]:.3f}x ({planner[1]:.2f}-{planner[2]:.2f})  "
                f"best fixed {found[best][0]:.3f}x {best}  ratio {planner[0] / max(1.0, found[best][0]):.3f}"
            )


def main() -> None:
    """Measure what is missing; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets' JSON lines")
    parser.add_argument("--plan", type=Path, required=True, help="a file of specdiff tune")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--sets", nargs="*", help="only these data sets")
    parser.add_argument("--prompts", type=int, default=8, help="of each data set")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    o = parser.parse_args()
    torch.set_num_threads(1)
    decoder = load(o.target, o.drafter, dtype=o.dtype)
    assert decoder.drafter is not None
    plan, gamma = load_plan(o.plan, identity(decoder)), decoder.drafter.max_gamma or 8
    rows = jsonl.rows(o.out)
    done = {(r["set"], r["temperature"], r["candidate"], r["id"]) for r in rows}
    sets = {k: v for k, v in data_sets(o.data, o.prompts).items() if not o.sets or k in o.sets}
    stop = StopOptions(max_new_tokens=o.max_new_tokens)
    for temperature in o.temperatures:
        sampling = SamplingOptions(temperature=temperature)
        candidates = [PLANNER, *GRID[0.0 if sampling.greedy else 1.0]]
        chosen: dict[str, Settings | None] = {PLAIN: None}
        chosen |= {c: settings(c, gamma, plan, greedy=sampling.greedy) for c in candidates}
        decoders = {
            c: SpeculativeDecoder(decoder.target, decoder.drafter if s else None, decoder.tokenizer, s)
            for c, s in chosen.items()
        }
        warm = decoder.encode(LANGUAGES[0], chat=True)
        for each in decoders.values():
            each.generate(warm, sampling=sampling, stop=StopOptions(max_new_tokens=8))
        for name, prompts in sets.items():
            for place, (key, prompt) in enumerate(prompts):
                order, ids = list(decoders), decoder.encode(prompt, chat=True)
                for c in order[place % len(order) :] + order[: place % len(order)]:
                    if (name, temperature, c, key) in done:
                        continue
                    began = time.perf_counter()
                    result = decoders[c].generate(ids, sampling=sampling, stop=stop)
                    seconds = time.perf_counter() - began
                    assert isinstance(result, Generation)
                    row = {"set": name, "temperature": temperature, "candidate": c, "id": key, "seconds": seconds}
                    row |= {"tokens": len(result.tokens), "rounds": len(result.rounds)}
                    rows.append(row)
                    jsonl.append(o.out, row)
    report(rows, o.temperatures)


if __name__ == "__main__":
    main()
