"""Losslessness on real prompts: the default pair (or any drafter, rule, shape) against ``transformers`` ``generate``.

One JSON line a prompt is appended to --out; a rerun continues where it stopped. References are kept in --references, so
that further drafters and rules cost their own time only.

usage: python scripts/parity.py --prompts gsm8k_test.jsonl:100 humaneval.jsonl:50 spec_bench.jsonl:50 --out parity.jsonl
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch

import jsonl
from specdiff.bench.compare import transformers_generate
from specdiff.bench.parity import compare_texts, teacher_force
from specdiff.control.defaults import default_budget
from specdiff.decoder import Generation, Settings, SpeculativeDecoder, load
from specdiff.sampling import SamplingOptions
from specdiff.shapes import parse_shape
from specdiff.stopping import StopOptions
from specdiff.types import Budget


def read(spec: str) -> list[tuple[str, str]]:
    """``path:count`` -> (id, prompt) of the first rows."""
    path, _, count = spec.rpartition(":")
    return jsonl.prompts(path, 0, int(count))


def done(path: Path) -> dict[str, dict]:
    """Lines already written, by key."""
    return {row["key"]: row for row in jsonl.rows(path)}


def main() -> None:
    """Compare; print a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL:COUNT, first rows of each file")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="default")
    parser.add_argument("--rule", default="auto")
    parser.add_argument("--shape", default=None)
    parser.add_argument("--gamma", type=int, default=None)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--references", type=Path, default=Path("references.jsonl"))
    o = parser.parse_args()
    torch.set_num_threads(1)
    decoder = load(o.target, o.drafter, dtype=o.dtype)
    base = default_budget(decoder.drafter, greedy=True, gamma=o.gamma)
    budget = Budget(gamma=base.gamma, shape=parse_shape(o.shape) if o.shape else base.shape)
    settings = Settings(rule=o.rule, budget=budget)
    decoder = SpeculativeDecoder(decoder.target, decoder.drafter, decoder.tokenizer, settings)
    model = decoder.target.model
    sampling, stop = SamplingOptions(), StopOptions(max_new_tokens=o.max_new_tokens)
    plain = transformers_generate(model, sampling, stop)
    references, results = done(o.references), done(o.out)
    label = f"{o.drafter}/{o.rule}/{budget.shape}/{o.dtype}/{o.max_new_tokens}"
    for spec in o.prompts:
        for name, prompt in read(spec):
            key = f"{label}/{name}"
            if key in results:
                continue
            ids = decoder.encode(prompt, chat=True)
            generation = decoder.generate(ids, sampling=sampling, stop=stop)
            assert isinstance(generation, Generation)
            row: dict = {"key": key, "label": label, "tau": generation.totals.tau, "tokens": len(generation.tokens)}
            if o.dtype == "fp32":
                reference_key = f"{o.target}/{o.dtype}/{o.max_new_tokens}/{name}"
                if reference_key not in references:
                    references[reference_key] = {"key": reference_key, "ids": list(plain(ids))}
                    jsonl.append(o.references, references[reference_key])
                parity = compare_texts(model, ids, generation.tokens, references[reference_key]["ids"])
                row |= {"verdict": parity.verdict(), "position": parity.position, "margin": parity.margin}
            else:
                forced = teacher_force(model, ids, generation.tokens)
                row |= {"argmax": forced.argmax, "margins": forced.margins}
            results[key] = row
            jsonl.append(o.out, row)
    rows = [r for r in results.values() if r["label"] == label]
    tokens = sum(r["tokens"] for r in rows)
    if o.dtype == "fp32":
        print(label, len(rows), "prompts", tokens, "tokens", dict(Counter(r["verdict"] for r in rows)))
    else:
        margins = sorted((m for r in rows for m in r["margins"]), reverse=True)
        agreed = sum(r["argmax"] for r in rows)
        print(
            label,
            len(rows),
            "prompts",
            tokens,
            "tokens",
            f"{agreed} are the argmax of a fresh pass; {len(margins)} are not, largest margins {margins[:3]}",
        )


if __name__ == "__main__":
    main()
