"""Which draft shape, rule and draft temperature pay for a pair: tokens a round and tokens a second, side by side.

Candidates take turns prompt by prompt, so that a drifting machine hurts all alike. One JSON line a (candidate, prompt,
seed) is appended to --out; a rerun continues where it stopped. Choose on held-out TRAINING prompts only.

usage: python scripts/shapes.py --prompts gsm8k_train.jsonl:7073:7093 --temperature 1 --out shapes.jsonl \
    --candidates siblings:6,2,1,1/auto/1 siblings:6,2,1,1/traversal/1 best-first:15/walk/1
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch

import jsonl
from specdiff.bench.tune import identity
from specdiff.control.plan import Plan
from specdiff.control.plan_file import load_plan
from specdiff.decoder import Generation, Settings, SpeculativeDecoder, load
from specdiff.sampling import SamplingOptions
from specdiff.shapes import parse_shape
from specdiff.stopping import StopOptions
from specdiff.types import Budget

PLAIN, PLANNER = "plain", "planner"


def read(spec: str) -> list[tuple[str, str]]:
    """``path:first:last`` -> (id, prompt) of those rows."""
    path, first, last = spec.rsplit(":", 2)
    return jsonl.prompts(path, int(first), int(last))


def settings(candidate: str, gamma: int, plan: Plan | None, *, greedy: bool) -> Settings:
    """``shape/rule/draft temperature``, optionally with ``/gamma``; or ``planner``."""
    if candidate == PLANNER:
        assert plan is not None, "--candidates planner needs --plan"
        return Settings(budget=plan.menu(greedy=greedy).arms[0].budget, controller=plan.controller(greedy=greedy))
    shape, rule, temperature, *rest = candidate.split("/")
    budget = Budget(gamma=int(rest[0]) if rest else gamma, shape=parse_shape(shape), temperature=float(temperature))
    return Settings(rule=rule, budget=budget)


def interval(rows: list[tuple[dict, dict]], top: str, bottom: str, seed: int = 0) -> tuple[float, float, float]:
    """Ratio of totals of two rates over paired rows, with its bootstrap 95 % interval."""

    def ratio(pairs: list[tuple[dict, dict]]) -> float:
        a, b = (sum(p[i][top] for p in pairs) / sum(p[i][bottom] for p in pairs) for i in (0, 1))
        return a / b

    rng = random.Random(seed)
    draws = sorted(ratio(rng.choices(rows, k=len(rows))) for _ in range(1000))
    return ratio(rows), draws[25], draws[974]


def report(rows: list[dict], candidates: list[str]) -> None:
    """Print one line a candidate."""
    by = {c: {(r["id"], r["seed"]): r for r in rows if r["candidate"] == c} for c in [PLAIN, *candidates]}
    for c in candidates:
        shared = sorted(by[c].keys() & by[PLAIN].keys())
        if not shared:
            continue
        pairs = [(by[c][k], by[PLAIN][k]) for k in shared]
        mine = [p[0] for p in pairs]
        tau = sum(r["tokens"] for r in mine) / sum(r["rounds"] for r in mine)
        each = [1e3 * sum(r[t] for r in mine) / sum(r["rounds"] for r in mine) for t in ("draft", "target", "rest")]
        speed, low, high = interval(pairs, "tokens", "seconds")
        parts = "draft {:.1f} target {:.1f} rest {:.1f} ms a round".format(*each)
        print(f"{c:40} n={len(shared):3} tau {tau:.3f}  {parts}  {speed:.3f}x plain ({low:.2f}-{high:.2f})")


def main() -> None:
    """Measure; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL:FIRST:LAST")
    parser.add_argument("--candidates", nargs="+", required=True, help="SHAPE/RULE/TEMPERATURE[/GAMMA], planner")
    parser.add_argument("--plan", type=Path, help="a file of specdiff tune, for the candidate planner")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    torch.set_num_threads(1)
    decoder = load(o.target, o.drafter, dtype=o.dtype)
    assert decoder.drafter is not None
    gamma = decoder.drafter.max_gamma or 8
    sampling = SamplingOptions(temperature=o.temperature)
    stop = StopOptions(max_new_tokens=o.max_new_tokens)
    decoders = {PLAIN: SpeculativeDecoder(decoder.target, None, decoder.tokenizer)}
    plan = load_plan(o.plan, identity(decoder)) if o.plan else None
    for c in o.candidates:
        chosen = settings(c, gamma, plan, greedy=sampling.greedy)
        decoders[c] = SpeculativeDecoder(decoder.target, decoder.drafter, decoder.tokenizer, chosen)
    rows = jsonl.rows(o.out)
    done = {(r["candidate"], r["id"], r["seed"]) for r in rows}
    prompts = [p for spec in o.prompts for p in read(spec)]
    for d in decoders.values():  # untimed warm-up
        d.generate(decoder.encode(prompts[0][1], chat=True), sampling=sampling, stop=StopOptions(max_new_tokens=16))
    for seed in range(o.seeds):
        for place, (name, prompt) in enumerate(prompts):
            ids = decoder.encode(prompt, chat=True)
            order = list(decoders)
            for c in order[place % len(order) :] + order[: place % len(order)]:
                if (c, name, seed) in done:
                    continue
                began = time.perf_counter()
                result = decoders[c].generate(ids, sampling=sampling, stop=stop, seed=seed, clock=time.perf_counter)
                seconds = time.perf_counter() - began
                assert isinstance(result, Generation)
                t = result.totals
                row = {"candidate": c, "id": name, "seed": seed, "seconds": seconds, "tokens": len(result.tokens)}
                draft, target = t.draft_seconds, t.target_seconds
                row |= {"rounds": t.rounds, "draft": draft, "target": target, "rest": seconds - draft - target}
                rows.append(row)
                jsonl.append(o.out, row)
    report(rows, o.candidates)


if __name__ == "__main__":
    main()
