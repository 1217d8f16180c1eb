"""An EAGLE head from corpora and a target: prepared, resumed, and measured by the code that decodes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specdiff.checking import integer, real
from specdiff.corpus.read import Corpus
from specdiff.corpus.row import CorpusRow, Finish
from specdiff.decode import DecodeLoop, Request
from specdiff.distill.data import split
from specdiff.distill.recipe import adopt
from specdiff.distill.run import corpora_record, read_corpora
from specdiff.drafters.eagle import EagleDrafter
from specdiff.errors import InputError
from specdiff.models.eagle import EagleHead
from specdiff.models.layer_cut import target_fingerprint
from specdiff.models.tables import embedding_table, output_table
from specdiff.models.target import CausalTarget
from specdiff.objectives.eagle import CLASSIFICATION_WEIGHT
from specdiff.records import Totals
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions
from specdiff.train.eagle import EagleTrainer
from specdiff.train.trainer import CHECKPOINT_NAME, TrainerConfig
from specdiff.train.windows import StreamConfig, WindowStream, read_rows
from specdiff.types import EAGLE_TREE, Budget, DynamicTree, Shape

_SHORTEST = 3  # tokens of a row that has something to learn: a feature, the next token, and one to predict


@dataclass(frozen=True, kw_only=True)
class EagleRecipe:
    """How a head is trained on a target's answers.

    Attributes:
        bias: whether the projection has one, as the published heads have.
        dtype: the models compute in it (masters are fp32): ``bf16`` or ``fp32``.
        steps: of the optimiser; the schedule follows them, so that a resumed run equals an uninterrupted one.
        rows: answers of a batch. accumulate: batches of a step. positions, noise, weight: see `EagleTrainer`.
        learning_rate: peak. warmup: share of the steps spent rising. weight_decay, ema_decay: 0 = none.
        held_out: prompts kept out of training, to measure on. evaluate_tokens: decoded of each, 0 = none.
        seed: of everything drawn.
    """

    bias: bool = True
    dtype: str = "bf16"
    steps: int = 2000
    rows: int = 8
    accumulate: int = 1
    positions: int = 256
    noise: float = 0.2
    weight: float = CLASSIFICATION_WEIGHT
    learning_rate: float = 1e-3
    warmup: float = TrainerConfig.warmup
    weight_decay: float = TrainerConfig.weight_decay
    ema_decay: float = TrainerConfig.ema_decay
    held_out: int = 10
    evaluate_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject what no run can be made of."""
        for name in ("steps", "rows", "accumulate"):
            integer(name, getattr(self, name), 1, remedy="give a positive number")
        for name in ("positions", "held_out", "evaluate_tokens", "seed"):
            integer(name, getattr(self, name), 0, remedy="0 is the least")
        limit = float("inf")
        for name in ("noise", "weight", "weight_decay"):
            real(name, getattr(self, name), lambda x: 0 <= x < limit, expected="a number >= 0", remedy="leave it out")
        real("learning_rate", self.learning_rate, lambda x: 0 < x < limit, expected="a rate > 0", remedy="try 1e-3")
        real("warmup", self.warmup, lambda x: 0 <= x < 1, expected="a share in [0, 1)", remedy="try 0.03")
        real("ema_decay", self.ema_decay, lambda x: 0 <= x < 1, expected="in [0, 1)", remedy="try 0.99, or 0 for none")
        if self.dtype not in ("bf16", "fp32"):
            raise InputError.of("dtype", expected="one of bf16, fp32", got=self.dtype, remedy="choose one")


CASES: tuple[tuple[str, Shape, int], ...] = (
    ("static, T = 0", EAGLE_TREE, 5),
    ("dynamic, T = 0", DynamicTree(), 6),
)
"""What is measured: the published trees of EAGLE and EAGLE-2, and their depths."""


def measure(target: CausalTarget, head: EagleHead, prompts: Sequence[Sequence[int]], *, tokens: int) -> dict[str, Any]:
    """Tokens a round and acceptance by position at temperature 0, by the decode loop.

    Args:
        target: of the head. head: as it stands. prompts: token ids. tokens: to decode of each.
    """
    was_training = head.training
    drafter = EagleDrafter(head)
    found: dict[str, Any] = {}
    for name, shape, gamma in CASES:
        requests = [
            Request(
                prompt=torch.tensor(prompt),
                sampling=SamplingOptions(temperature=0.0),
                stop=StopOptions(max_new_tokens=tokens),
                index=i,
            )
            for i, prompt in enumerate(prompts)
        ]
        loop = DecodeLoop(target, drafter, requests, budget=Budget(gamma=gamma, shape=shape))
        for _ in loop.run():
            pass
        totals = Totals.of([record for row in loop.rows for record in row.rounds])
        positions = [round(x, 4) for x in totals.acceptance_by_position]
        found[name] = {"tau": round(totals.tau, 4), "rounds": totals.rounds, "acceptance_by_position": positions}
    head.train(was_training)
    return found


def _bare(path: Path, target: CausalTarget) -> Corpus:
    """Rows without a manifest; their log-probabilities are not known.

    Raises:
        InputError: there is no such file, or it holds no row of this vocabulary.
    """
    if not path.is_file():
        raise InputError.of("answers", expected="a file of rows", got=str(path), remedy="check the path")
    rows: list[CorpusRow] = []
    for row in read_rows(path):
        if not 0 <= min(row.tokens) <= max(row.tokens) < target.vocab_size:
            raise InputError.of(
                "answers",
                expected=f"ids below {target.vocab_size}",
                got=f"row {row.id!r}",
                remedy="use this target's rows",
            )
        ids = row.tokens[row.prompt_length :]
        finish: Finish = "eos" if ids[-1] in target.eos_ids else "length"
        prompt = row.tokens[: row.prompt_length]
        rows.append(
            CorpusRow(
                id=row.id, sample=0, prompt_ids=prompt, ids=ids, logprobs=(math.nan,) * len(ids), finish=finish, seed=0
            )
        )
    if not rows:
        raise InputError.of("answers", expected="at least one row", got=str(path), remedy="check the file")
    return Corpus(rows=tuple(rows), manifests=())


def prepare_eagle(
    recipe: EagleRecipe,
    output: Path,
    target: CausalTarget,
    tokenizer: PreTrainedTokenizerBase,
    corpora: Sequence[tuple[Path, float]],
    *,
    answers: Sequence[tuple[Path, float]] = (),
    allow_other_model: bool = False,
    name: str = "eagle",
    checkpoint_minutes: float = 10.0,
    evaluate_minutes: float = 20.0,
) -> EagleTrainer:
    """Make the trainer of a run, at its last checkpoint if it has one.

    Args:
        recipe: what decides the result. output: folder of the run.
        target: loaded in the recipe's dtype; frozen, never written. tokenizer: its own.
        corpora: folders or row files of this target's answers, and how much of a batch comes from each.
        answers: files of bare rows (``id``, ``prompt_ids``, ``ids``) and their weights; nothing checks whose they are.
        allow_other_model: take answers of another model with the same tokenizer.
        name: free label of the head. checkpoint_minutes, evaluate_minutes: of training time.

    Raises:
        InputError: settings, corpora and target do not fit, or another run is in the folder (CorpusError,
            BrokenRowError: see `specdiff.corpus.read`).
        CheckpointError: files of the run are damaged. UnsupportedModelError: the target's layers do not fit.
    """
    tables = target_fingerprint(embedding_table(target.model), output_table(target.model))
    read: list[tuple[Corpus, float]] = []
    if corpora or not answers:
        read += read_corpora(corpora, target, tables, tokenizer, allow_other_model=allow_other_model)
    read += [(_bare(path, target), weight) for path, weight in answers]
    parts = split(read, held_out=recipe.held_out, window=1)
    wanted: dict[str, object] = {
        "kind": "eagle",
        "name": name,
        "recipe": json.loads(json.dumps(asdict(recipe))),
        "target": {"name": target.name, "tables": tables},
        "corpora": corpora_record(read),
    }
    begun = (output / CHECKPOINT_NAME).is_file()
    adopt(output, wanted, begun=begun)
    torch.manual_seed(recipe.seed)
    target.model.requires_grad_(False)
    head = EagleHead(target.model, bias=recipe.bias, name=name)
    sources = [(tuple(row for row in rows if len(row.tokens) >= _SHORTEST), weight) for rows, weight in parts.sources]
    stream = WindowStream(
        sources,
        torch.arange(target.vocab_size),
        StreamConfig(rows_per_batch=recipe.rows, window=1, seed=recipe.seed),
    )
    config = TrainerConfig(
        steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        warmup=recipe.warmup,
        weight_decay=recipe.weight_decay,
        ema_decay=recipe.ema_decay,
        accumulate=recipe.accumulate,
        checkpoint_minutes=checkpoint_minutes,
        evaluate_minutes=evaluate_minutes,
        seed=recipe.seed,
    )
    prompts = [ids for _, ids in parts.held_out]
    evaluator = None
    if prompts and recipe.evaluate_tokens:
        evaluator = lambda: measure(target, head, prompts, tokens=recipe.evaluate_tokens)  # noqa: E731
    trainer = EagleTrainer(
        head,
        target.model,
        stream,
        output,
        config,
        positions=recipe.positions,
        noise=recipe.noise,
        weight=recipe.weight,
        evaluator=evaluator,
    )
    if begun:
        trainer.resume()
    return trainer
