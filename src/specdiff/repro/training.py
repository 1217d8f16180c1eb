"""The drafters that a study compares: one start, the same data order, steps and seed for each objective.

All training of the studies goes through `train_unaligned` and `train_aligned`; both leave a finished model alone, and
go on with one that was interrupted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from specdiff.checking import integer
from specdiff.distill.recipe import Recipe, adopt
from specdiff.distill.run import prepare
from specdiff.errors import InputError, SpecdiffError
from specdiff.files import write_text
from specdiff.models.denoiser import WEIGHTS_NAME, BlockCausalDenoiser
from specdiff.models.layer_cut import find_layer_list, target_fingerprint
from specdiff.models.tables import embedding_table, output_table
from specdiff.models.target import CausalTarget
from specdiff.objectives.base import Windows
from specdiff.objectives.masked import MaskedCrossEntropy
from specdiff.repro.progress import Progress, silent
from specdiff.train.attention import register_window_attention
from specdiff.train.packed import packed_window_states
from specdiff.train.trainer import CHECKPOINT_NAME, DenoiserTrainer, TrainerConfig
from specdiff.train.windows import (
    AnswerRow,
    StreamConfig,
    WindowBatch,
    WindowStream,
    frequent_tokens,
    label_table,
    read_rows,
)

HELD_OUT_LOSS = "held_out_loss.json"
_LOSS_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the models of a study are, and how long they train.

    Attributes:
        layers: target layers to start from; None = the first fifth. window, draft_vocab_size, dtype, rows, anchors,
            learning_rate, seed: see `specdiff.distill.recipe.Recipe`.
        unaligned_steps: on human text. steps: of each objective after it. checkpoint_minutes: of training time.
        held_out: human texts kept out, to measure the loss on; prompts kept out of the corpora.
    """

    layers: tuple[int, ...] | None = None
    window: int = 8
    draft_vocab_size: int = 9216
    dtype: str = "bf16"
    rows: int = 6
    anchors: int = 64
    learning_rate: float = TrainerConfig.learning_rate
    seed: int = 0
    unaligned_steps: int = 2000
    steps: int = 1000
    checkpoint_minutes: float = 5.0
    held_out: int = 16

    def __post_init__(self) -> None:
        for name in ("window", "draft_vocab_size", "rows", "anchors", "unaligned_steps", "steps", "held_out"):
            integer(name, getattr(self, name), 1, remedy="give a positive number")

    def recipe(self, objective: str, parameters: Mapping[str, object], steps: int) -> Recipe:
        """The recipe of an aligned drafter; everything but the objective is the scale's."""
        return Recipe(
            layers=self.layers,
            window=self.window,
            draft_vocab_size=self.draft_vocab_size,
            objective=objective,
            parameters=parameters,
            dtype=self.dtype,
            steps=steps,
            rows=self.rows,
            anchors=self.anchors,
            learning_rate=self.learning_rate,
            held_out=self.held_out,
            evaluate_tokens=0,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished drafter.

    Attributes:
        folder: to load. facts: how it was made, for the header and the report.
    """

    folder: Path
    facts: Mapping[str, Any] = field(default_factory=dict)


class Workshop:
    """Makes drafters for one target.

    Args:
        target, tokenizer: loaded in the scale's dtype. folder: where runs are kept. scale: see there.
        progress: told the steps.
    """

    def __init__(
        self,
        target: CausalTarget,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        scale: Scale,
        *,
        progress: Progress = silent,
    ) -> None:
        self.target, self.tokenizer, self.folder, self.scale = target, tokenizer, folder, scale
        self._progress = progress

    def unaligned(self, rows: Path) -> Trained:
        """The start of all: trained with whole-window masked cross-entropy on human text only.

        Args:
            rows: row file, see `specdiff.repro.human_text`.

        Raises:
            InputError: too few rows, or another run is in the folder.
        """
        return train_unaligned(self.target, rows, self.folder / "unaligned", self.scale, progress=self._progress)

    def aligned(
        self,
        name: str,
        objective: str,
        corpora: Sequence[tuple[Path, float]],
        start: Trained,
        *,
        parameters: Mapping[str, object] | None = None,
        steps: int | None = None,
    ) -> Trained:
        """A drafter that goes on from ``start`` with an objective on the target's answers.

        Args:
            name: of the run. objective, parameters: see `specdiff.objectives.registry`. corpora: with weights.
            start: what to go on from. steps: None = the scale's.

        Raises:
            InputError: see `specdiff.distill.run.prepare`.
        """
        recipe = self.scale.recipe(objective, parameters or {}, self.scale.steps if steps is None else steps)
        return train_aligned(
            self.target, self.tokenizer, recipe, self.folder / name, corpora, start.folder,
            checkpoint_minutes=self.scale.checkpoint_minutes, progress=self._progress,
        )  # fmt: skip


def train_aligned(
    target: CausalTarget,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    output: Path,
    corpora: Sequence[tuple[Path, float]],
    start: Path,
    *,
    checkpoint_minutes: float,
    progress: Progress = silent,
) -> Trained:
    """Train as ``specdiff distill`` does, from an exported drafter.

    Raises:
        InputError: the trainer cannot run the objective, or see `specdiff.distill.run.prepare`.
    """
    trainer = prepare(
        recipe, output, target, tokenizer, corpora, start_from=start, name=output.name,
        checkpoint_minutes=checkpoint_minutes, evaluate_minutes=1e9,
    )  # fmt: skip
    facts = {"recipe": recipe.to_json(), "start": weights_digest(start)}
    return _finish(trainer, output, recipe.steps, facts, progress)


def train_unaligned(
    target: CausalTarget, rows: Path, output: Path, scale: Scale, *, progress: Progress = silent
) -> Trained:
    """Train on human text with whole-window masked cross-entropy, and measure the loss on texts that were kept out.

    Raises:
        InputError: too few rows, or another run is in the folder.
    """
    torch.manual_seed(scale.seed)
    train, kept = _split(read_rows(rows), scale.held_out)
    layers = scale.layers
    if layers is None:
        layers = tuple(range(max(1, round(len(find_layer_list(target.model.get_decoder())[1]) / 5))))
    tables = target_fingerprint(embedding_table(target.model), output_table(target.model))
    record = {
        "kind": "human text", "scale": json.loads(json.dumps(asdict(scale))), "target": tables,
        "rows": hashlib.sha256(rows.read_bytes()).hexdigest(),
    }  # fmt: skip
    for name in ("steps", "checkpoint_minutes"):  # no part of this run
        del record["scale"][name]
    begun = (output / CHECKPOINT_NAME).is_file()
    adopt(output, record, begun=begun)
    vocab = frequent_tokens(train, vocab_size=target.vocab_size, size=scale.draft_vocab_size, always=target.eos_ids)
    denoiser = BlockCausalDenoiser.from_target(
        target.model, draft_vocab=vocab, layers=layers, window=scale.window, name="unaligned"
    )
    denoiser.decoder.set_attn_implementation(register_window_attention())
    config = StreamConfig(
        rows_per_batch=scale.rows, anchors_per_row=scale.anchors, window=scale.window, seed=scale.seed
    )
    labels_of = label_table(vocab, target.vocab_size)
    trainer = DenoiserTrainer(
        denoiser,
        WindowStream([(train, 1.0)], labels_of, config),
        (),
        output,
        TrainerConfig(
            steps=scale.unaligned_steps,
            learning_rate=scale.learning_rate,
            checkpoint_minutes=scale.checkpoint_minutes,
            evaluate_minutes=1e9,
            seed=scale.seed,
        ),
        objective=MaskedCrossEntropy(),
        nodes=1,
    )
    if begun:
        trainer.resume()
    facts = {"human_rows": len(train), "held_out": len(kept)}
    trained = _finish(trainer, output, scale.unaligned_steps, facts, progress)
    path = output / HELD_OUT_LOSS
    if not path.is_file():
        trainer.master.load(trainer.master.average or trainer.master.weights)
        write_text(path, json.dumps(held_out_loss(denoiser, WindowStream([(kept, 1.0)], labels_of, config))) + "\n")
    return Trained(folder=trained.folder, facts={**trained.facts, "held_out_loss": json.loads(path.read_text())})


@torch.no_grad()
def held_out_loss(denoiser: BlockCausalDenoiser, stream: WindowStream, batches: int = _LOSS_BATCHES) -> dict[str, Any]:
    """Mean negative log-likelihood, in nats a token, of windows that were not trained on.

    Args:
        denoiser: with the blockwise attention set. stream: of kept-out texts. batches: how many of it.

    Returns:
        ``nll`` over all offsets, ``nll_by_offset``, and ``tokens``: how many were scored, all in the draft vocabulary.
    """
    denoiser.eval()
    scored, log_q = torch.zeros(denoiser.window), torch.zeros(denoiser.window)
    for number in range(batches):
        batch = stream.batch(number)
        states = packed_window_states(denoiser, batch)
        result = MaskedCrossEntropy().loss(
            Windows(hidden=states.flatten(0, 1), head_weight=denoiser.head_weight, labels=batch.labels.flatten(0, 1))
        )
        scored += result.scored.sum(0).cpu()
        log_q += result.log_q.sum(0).cpu()
    by_offset = -log_q / scored.clamp_min(1)
    return {
        "nll": round(float(-log_q.sum() / scored.sum().clamp_min(1)), 4),
        "nll_by_offset": [round(x, 4) for x in by_offset.tolist()],
        "tokens": int(scored.sum()),
    }


def weights_digest(folder: Path) -> str:
    """Which weights a folder of a drafter holds."""
    return "sha256:" + hashlib.sha256((folder / WEIGHTS_NAME).read_bytes()).hexdigest()


def _split(rows: Sequence[AnswerRow], held_out: int) -> tuple[list[AnswerRow], list[AnswerRow]]:
    """(to train on, kept out): texts are kept out by a hash of their names."""
    if held_out >= len(rows):
        raise InputError.of(
            "held_out", expected=f"fewer than the {len(rows)} texts there are", got=held_out, remedy="give more texts"
        )
    order = sorted(rows, key=lambda row: hashlib.sha256(row.id.encode()).digest())
    kept = {row.id for row in order[:held_out]}
    return [r for r in rows if r.id not in kept], [r for r in rows if r.id in kept]


class _ToldStream:
    """The trainer's batches, with a word at each: the trainer itself tells nobody."""

    def __init__(self, inner: WindowStream, told: Callable[[int], None]) -> None:
        self._inner, self._told = inner, told

    def batch(self, number: int) -> WindowBatch:
        self._told(number)
        return self._inner.batch(number)

    def row_ids(self, number: int) -> list[str]:
        return self._inner.row_ids(number)

    def epochs(self, number: int) -> list[float]:
        return self._inner.epochs(number)


def _finish(trainer: DenoiserTrainer, output: Path, steps: int, facts: dict[str, Any], progress: Progress) -> Trained:
    export = output / "export" / "ema"
    if trainer.step < steps or not (export / WEIGHTS_NAME).is_file():
        what = f"training {output.name}"
        trainer.stream = cast("Any", _ToldStream(trainer.stream, lambda number: progress(what, number, steps)))
        trainer.run()
        progress(what, trainer.step, steps)
    if trainer.step < steps:
        raise SpecdiffError(
            f"{output.name}: stopped at step {trainer.step} of {steps}; the same command goes on from there"
        )
    return Trained(
        folder=export,
        facts={**facts, "steps": steps, "minutes": round(trainer.seconds / 60, 2), "weights": weights_digest(export)},
    )
