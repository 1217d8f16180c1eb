"""Losslessness of every exact rule with every drafter and draft shape, on real weights, temperature 0, fp32.

All prompts of a pair are decoded as one ragged batch and compared with ``transformers`` ``generate``'s texts, which
`scripts/parity.py` has kept (longer ones are cut). One JSON line a pair is appended to --out; a rerun goes on where it
stopped.

usage: python scripts/parity_pairs.py --references references.jsonl --prompts gsm8k_test.jsonl:10 humaneval.jsonl:10 \
    --drafters default ngram default+ngram AUTOREGRESSIVE_FOLDER --out pairs.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

import jsonl
from parity import done, read
from specdiff.bench.parity import compare_texts
from specdiff.decoder import Settings, SpeculativeDecoder, load
from specdiff.drafters.base import Drafter
from specdiff.errors import InputError, PairingError
from specdiff.records import Totals
from specdiff.sampling import SamplingOptions
from specdiff.shapes import parse_shape
from specdiff.stopping import StopOptions
from specdiff.types import Budget, Chain
from specdiff.verify.base import check
from specdiff.verify.registry import RULES


def pairs(drafter: Drafter, shapes: list[str], gamma: int) -> Iterator[tuple[str, str, Budget]]:
    """(shape, rule, budget) of all that fit together at temperature 0."""
    for text in shapes:
        budget = Budget(gamma=min(gamma, drafter.max_gamma or gamma), shape=parse_shape(text))
        for name, rule in RULES.items():
            try:
                check(rule, drafter.provenance(budget), greedy=True, tree=not isinstance(budget.shape, Chain))
            except (InputError, PairingError):
                continue
            yield text, name, budget


def main() -> None:
    """Compare; print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True, help="JSONL:COUNT, first rows of each file")
    parser.add_argument("--references", type=Path, nargs="+", required=True)
    parser.add_argument("--reference-tokens", type=int, default=128, help="the length they were made with")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafters", nargs="+", default=["default", "ngram", "default+ngram"])
    parser.add_argument("--family", default=None, help="of masked diffusion drafters whose configuration lacks it")
    parser.add_argument("--steps", type=int, default=1, help="of masked diffusion drafters")
    parser.add_argument("--shapes", nargs="+", default=["chain", "samples:4", "siblings:4,2,1", "best-first:15"])
    parser.add_argument("--gamma", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    torch.set_num_threads(1)
    references = {k: v["ids"] for path in o.references for k, v in done(path).items()}
    results, prompts = done(o.out), [p for spec in o.prompts for p in read(spec)]
    stop = StopOptions(max_new_tokens=o.max_new_tokens)
    for drafter_name in o.drafters:
        decoder = load(o.target, drafter_name, dtype="fp32", family=o.family, steps=o.steps)
        assert decoder.drafter is not None
        model = decoder.target.model
        ids = [decoder.encode(prompt, chat=True) for _, prompt in prompts]
        expected = [
            references[f"{o.target}/fp32/{o.reference_tokens}/{name}"][: o.max_new_tokens] for name, _ in prompts
        ]
        label = drafter_name if o.steps == 1 else f"{drafter_name}@{o.steps}"
        for shape, rule, budget in pairs(decoder.drafter, o.shapes, o.gamma):
            key = f"{o.target}/{label}/{shape}/{rule}/{len(prompts)}x{o.max_new_tokens}"
            if key in results:
                continue
            one = SpeculativeDecoder(
                decoder.target, decoder.drafter, decoder.tokenizer, Settings(rule=rule, budget=budget)
            )
            texts = one.generate(ids, sampling=SamplingOptions(), stop=stop)
            assert isinstance(texts, list)
            verdicts, margins = Counter(), []
            for prompt, text, reference in zip(ids, texts, expected, strict=True):
                parity = compare_texts(model, prompt, text.tokens, reference)
                verdicts[parity.verdict()] += 1
                margins += [parity.margin] if not parity.equal else []
            totals = Totals.of([r for t in texts for r in t.rounds])
            row = {"key": key, "verdicts": dict(verdicts), "margins": margins, "tau": totals.tau}
            row |= {"tokens": sum(len(t.tokens) for t in texts)}
            results[key] = row
            print(json.dumps(row), flush=True)
            jsonl.append(o.out, row)
    total = Counter()
    for row in results.values():
        total.update(row["verdicts"])
    print(len(results), "pairs", sum(r["tokens"] for r in results.values()), "tokens", dict(total))


if __name__ == "__main__":
    main()
