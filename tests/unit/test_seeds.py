"""Row 10: the same seed gives the same tokens: alone, in a batch, streamed round by round, and in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdiff.decode import DecodeLoop, Request
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.models.target import CausalTarget
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions
from specdiff.testing import TableMarginals, TableTarget
from specdiff.types import BestFirst, Budget, Chain, Samples, Shape, Siblings
from support.tiny_targets import tiny_model

V = 11
SHAPES: dict[str, Shape] = {
    "chain": Chain(),
    "samples": Samples(3),
    "siblings": Siblings((2, 2, 1)),
    "best-first": BestFirst(8),
}


def requests() -> list[Request]:
    """Prompts of different lengths, options and seeds; the index is the place in the caller's list."""
    made = []
    for i in range(6):
        sampling = SamplingOptions(temperature=(1.0, 0.6, 1.5)[i % 3], top_p=(1.0, 0.9)[i % 2])
        stop = StopOptions(max_new_tokens=9 + 4 * i)
        prompt = torch.arange(1, 3 + i) % V
        made.append(Request(prompt=prompt, sampling=sampling, stop=stop, seed=(7, 7, 8)[i % 3], index=i))
    return made


def decode(wanted: list[Request], shape: Shape, *, target: object = None) -> list[list[int]]:
    """All rounds in one go."""
    loop = DecodeLoop(
        target or TableTarget.random(V, seed=1),  # type: ignore[arg-type]
        MarginalDrafter(TableMarginals.random(V, 4, seed=2)),
        wanted,
        budget=Budget(gamma=4, shape=shape),
    )
    for _ in loop.run():
        pass
    return [row.new_tokens for row in loop.rows]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_same_tokens(shape: Shape, figure: Callable[..., None]) -> None:
    together = decode(requests(), shape)
    assert decode(requests(), shape) == together
    alone = [decode([r], shape)[0] for r in requests()]
    assert alone == together
    backwards = decode(requests()[::-1], shape)[::-1]
    assert backwards == together
    streamed: list[list[int]] = [[] for _ in together]
    loop = DecodeLoop(
        TableTarget.random(V, seed=1),
        MarginalDrafter(TableMarginals.random(V, 4, seed=2)),
        requests(),
        budget=Budget(gamma=4, shape=shape),
    )
    for commits in loop.run():
        torch.manual_seed(len(commits))  # what the caller does meanwhile changes nothing
        torch.rand(7)
        for commit in commits:
            streamed[commit.row] += commit.tokens
    assert streamed == together
    ways = ["again", "alone", "batched", "reordered", "streamed"]
    figure(10, type(shape).__name__, equal=len(ways) * len(together), ways=ways)


def test_seeds_and_indices_differ() -> None:
    base = replace(requests()[5], stop=StopOptions(max_new_tokens=30))
    texts = decode([base, replace(base, seed=9), replace(base, index=3)], Chain())
    assert len({tuple(t) for t in texts}) == 3


def test_a_neighbour_that_is_added_changes_nothing() -> None:
    few = requests()[:3]
    extra = replace(requests()[4], index=17)
    assert decode([extra, *few], Samples(2))[1:] == decode(few, Samples(2))


def test_a_real_model(figure: Callable[..., None]) -> None:
    target = CausalTarget(tiny_model("llama", vocab_size=V, bos_token_id=1))
    together = decode(requests(), Siblings((2, 1, 1)), target=target)
    assert [decode([r], Siblings((2, 1, 1)), target=target)[0] for r in requests()] == together
    figure(10, "a real model", equal=2 * len(together), ways=["alone", "batched"])


def test_a_fresh_process(figure: Callable[..., None]) -> None:
    script = (
        "import json, sys; sys.path[:0] = [sys.argv[1]]\n"
        "from unit.test_seeds import SHAPES, decode, requests\n"
        "print(json.dumps({name: decode(requests(), shape) for name, shape in SHAPES.items()}))"
    )
    output = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parents[1])],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout
    expected = {name: decode(requests(), shape) for name, shape in SHAPES.items()}
    assert json.loads(output.splitlines()[-1]) == expected
    figure(10, "a fresh process", equal=sum(map(len, expected.values())), ways=["restarted"])
