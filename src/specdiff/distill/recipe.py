"""Everything that decides what a distillation run makes, checked before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specdiff.checking import flag, integer, real
from specdiff.corpus.manifest import differences
from specdiff.errors import CheckpointError, InputError
from specdiff.files import write_text
from specdiff.objectives.registry import make
from specdiff.train.trainer import TrainerConfig

RECIPE = "recipe.json"
_DTYPES = ("bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a block-causal denoiser is cut from a target and trained on the target's answers.

    Attributes:
        layers: target layers to start from, in order; None = the first fifth of them.
        feature_layers: target layers whose hidden states the drafter reads; () = none.
        window: W, tokens drafted in one pass. draft_vocab_size: tokens it may propose, the corpus' most frequent ones.
        objective: name in `specdiff.objectives.registry`. parameters: of the objective, those that differ from its own.
        dtype: the model computes in it (masters are fp32): ``bf16`` or ``fp32``.
        steps: of the optimiser; the schedule follows them, so that a resumed run equals an uninterrupted one.
        rows, anchors: answers of a batch, and windows hung off each. accumulate: batches of a step.
        learning_rate: peak. warmup: share of the steps spent rising. weight_decay, ema_decay: 0 = none.
        held_out: prompts kept out of training, to measure acceptance on. evaluate_tokens: decoded of each, 0 = replay
            their temperature-0 answers only. nodes: of the tree that is measured.
        fuse: compile norms and MLPs, which pays on CPUs after about a minute.
        seed: of everything drawn.
    """

    layers: tuple[int, ...] | None = None
    feature_layers: tuple[int, ...] = ()
    window: int = 8
    draft_vocab_size: int = 9216
    objective: str = "tree_presence"
    parameters: Mapping[str, object] = field(default_factory=dict)
    dtype: str = "bf16"
    steps: int = 2000
    rows: int = 6
    anchors: int = 64
    accumulate: int = TrainerConfig.accumulate
    learning_rate: float = TrainerConfig.learning_rate
    warmup: float = TrainerConfig.warmup
    weight_decay: float = TrainerConfig.weight_decay
    ema_decay: float = TrainerConfig.ema_decay
    held_out: int = 16
    evaluate_tokens: int = 64
    nodes: int = 15
    fuse: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject what no run can be made of."""
        for name in ("window", "draft_vocab_size", "steps", "rows", "anchors", "accumulate", "nodes"):
            integer(name, getattr(self, name), 1, remedy="give a positive number")
        for name in ("held_out", "evaluate_tokens", "seed"):
            integer(name, getattr(self, name), 0, remedy="0 is the least")
        limit = float("inf")
        real("learning_rate", self.learning_rate, lambda x: 0 < x < limit, expected="a rate > 0", remedy="try 8e-4")
        real("warmup", self.warmup, lambda x: 0 <= x < 1, expected="a share in [0, 1)", remedy="try 0.03")
        real("weight_decay", self.weight_decay, lambda x: 0 <= x < limit, expected=">= 0", remedy="try 0.01")
        real("ema_decay", self.ema_decay, lambda x: 0 <= x < 1, expected="in [0, 1)", remedy="try 0.99, or 0 for none")
        flag("fuse", self.fuse, remedy="say whether to compile norms and MLPs")
        if self.dtype not in _DTYPES:
            raise InputError.of("dtype", expected="one of " + ", ".join(_DTYPES), got=self.dtype, remedy="choose one")
        if self.layers is not None and not self.layers:
            raise InputError.of(
                "layers", expected="at least one layer", got=(), remedy="leave it out for the first fifth"
            )
        make(self.objective, self.parameters)

    def to_json(self) -> dict[str, Any]:
        """Plain data, as stored."""
        return json.loads(json.dumps(asdict(self) | {"parameters": dict(self.parameters)}))


def adopt(folder: Path, wanted: dict[str, Any], *, begun: bool) -> None:
    """Record what a new run is made of, or check that the one in the folder was begun with the same.

    Args:
        folder: of the run. wanted: recipe, target and corpora as plain data. begun: whether it holds a checkpoint.

    Raises:
        InputError: another run's checkpoint is there. CheckpointError: its record is missing or damaged.
    """
    path = folder / RECIPE
    if begun:
        try:
            present = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: expected the record of the run, got {error}; restore it") from error
        found = [f"{name} was {then!r}, is {now!r}" for name, then, now in differences(present, wanted)]
        if found:
            raise InputError(
                f"{folder}: expected the settings this run was begun with, got others ({'; '.join(found)}); continue "
                "it with the same ones, or choose another folder"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(wanted, indent=2) + "\n")
