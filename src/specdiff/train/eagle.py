"""Training an EAGLE head: one target pass a batch makes the features of whole answers, the head learns to go on.

Batches, positions and noise are pure functions of the seed and the batch's number, so a resumed run equals an
uninterrupted one bit for bit. The head computes in the target's dtype; the optimiser works on fp32 masters.

Shapes: B rows, T tokens of the longest, H hidden size.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from specdiff.errors import CheckpointError, InputError, NumericsError
from specdiff.files import write_atomically
from specdiff.models.eagle import EagleHead
from specdiff.objectives.eagle import CLASSIFICATION_WEIGHT, EagleLoss, eagle_loss
from specdiff.train.features import TargetFeatures
from specdiff.train.trainer import CHECKPOINT_NAME, MasterWeights, TrainerConfig
from specdiff.train.windows import AnswerRow, WindowStream

_NOISE_LENGTH = 512  # the published noise is scaled by 512 / length of the row
Evaluator = Callable[[], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class EagleBatch:
    """Whole answers, padded on the right.

    Attributes:
        tokens: [B, T] int64. lengths: of each row. learned: [B, T - 1] bool, head rows that drafting starts from or
            runs through: those that predict the feature of the last prompt token or of an answer token but the last.
    """

    tokens: Tensor
    lengths: Tensor
    learned: Tensor

    @classmethod
    def of(cls, rows: list[AnswerRow]) -> EagleBatch:
        """Pad rows of at least three tokens."""
        size = max(len(row.tokens) for row in rows)
        tokens = torch.zeros(len(rows), size, dtype=torch.int64)
        learned = torch.zeros(len(rows), size - 1, dtype=torch.bool)
        for b, row in enumerate(rows):
            tokens[b, : len(row.tokens)] = torch.tensor(row.tokens)
            # row i predicts feature i + 1, which gives token i + 2
            learned[b, max(row.prompt_length - 2, 0) : len(row.tokens) - 2] = True
        return cls(tokens=tokens, lengths=torch.tensor([len(row.tokens) for row in rows]), learned=learned)


class EagleTrainer:
    """The training loop.

    Files under the output directory: ``metrics.jsonl`` (one object a line), ``checkpoint.pt`` (to resume),
    ``export/raw`` and ``export/ema`` (heads to draft with).

    Args:
        head: to train. target: its target, frozen. stream: draws the rows.
        output: directory, created if needed. config: how to train.
        positions: of each batch, whose laws are compared by the classification loss, drawn anew each time; 0 = all.
        noise: width of the uniform noise on the features, scaled by 512 / length as published; 0 = none.
        weight: of the classification loss.
        evaluator: decodes with the head as it stands (the averaged weights, if there are any).

    Raises:
        InputError: an option is out of range.
    """

    def __init__(
        self,
        head: EagleHead,
        target: PreTrainedModel,
        stream: WindowStream,
        output: str | Path,
        config: TrainerConfig,
        *,
        positions: int = 256,
        noise: float = 0.2,
        weight: float = CLASSIFICATION_WEIGHT,
        evaluator: Evaluator | None = None,
    ) -> None:
        for name, value in (("positions", positions), ("noise", noise), ("weight", weight)):
            if not 0 <= value < math.inf:
                raise InputError.of(name, expected="a number >= 0", got=value, remedy="leave it out")
        self.head, self.stream, self.config = head, stream, config
        self.positions, self.noise, self.weight = positions, noise, weight
        self._features = TargetFeatures(target, head.feature_layers)
        self._evaluator = evaluator
        self.output = Path(output)
        self.output.mkdir(parents=True, exist_ok=True)
        self.master = MasterWeights(head, config)
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self._stop = False

    @property
    def progress(self) -> float:
        """Share of the budget used up."""
        if self.config.steps is not None:
            return self.step / self.config.steps
        return self.seconds / (60.0 * self.config.minutes)

    def loss(self, number: int) -> EagleLoss:
        """The loss of a batch, by its number."""
        batch = EagleBatch.of(self.stream.rows(number))
        device = self.head.fc.weight.device
        generator = torch.Generator().manual_seed(self.config.seed * 2**32 + number)
        tokens = batch.tokens.to(device)
        features = self._features(tokens).clone()  # a tensor that autograd may save
        noise = (torch.rand(features.shape, generator=generator) - 0.5) * self.noise
        noise *= (_NOISE_LENGTH / batch.lengths)[:, None, None]
        predicted = self.head(tokens[:, 1:], (features + noise.to(features))[:, :-1])
        learned = batch.learned.to(device)
        predicted, wanted = predicted[learned], features[:, 1:][learned]
        compared = torch.randperm(len(wanted), generator=generator)[: self.positions or None].to(device)
        with torch.no_grad():
            target_logits = self.head.logits(wanted[compared])
        return eagle_loss(predicted, wanted, self.head.logits(predicted[compared]), target_logits, weight=self.weight)

    def run(self) -> None:
        """Train until the budget is used up, or until SIGTERM or SIGINT; leave a checkpoint and exports behind.

        Raises:
            NumericsError: a loss or gradient is not finite; no weight was changed by it, and the last checkpoint stays.
            CheckpointError: a checkpoint cannot be written; the last one stays.
        """
        handlers = {s: signal.signal(s, self._request_stop) for s in (signal.SIGTERM, signal.SIGINT)}
        due_checkpoint = self.seconds + 60.0 * self.config.checkpoint_minutes
        due_evaluation = self.seconds + 60.0 * self.config.evaluate_minutes
        last = time.perf_counter()
        try:
            while self.progress < 1.0 and not self._stop:
                self._train_step()
                now = time.perf_counter()
                self.seconds, last = self.seconds + now - last, now
                if self.seconds >= due_checkpoint:
                    self.checkpoint()
                    due_checkpoint = self.seconds + 60.0 * self.config.checkpoint_minutes
                if self.seconds >= due_evaluation:
                    self.evaluate()
                    due_evaluation = self.seconds + 60.0 * self.config.evaluate_minutes
                    last = time.perf_counter()  # measuring is no training time
            self.checkpoint()
            if not self._stop:
                self.evaluate()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _train_step(self) -> None:
        self.head.train()
        parts = torch.zeros(4)
        first = self.step * self.config.accumulate
        for number in range(first, first + self.config.accumulate):
            result = self.loss(number)
            (result.loss / self.config.accumulate).backward()
            values = (result.loss, result.regression, result.classification, result.agreement)
            parts += torch.stack([v.detach().float().cpu() for v in values]) / self.config.accumulate
            self._check_finite("loss", float(result.loss.detach()), number)
            self.tokens += sum(len(row.tokens) for row in self.stream.rows(number))
        rate = self.config.rate(self.progress)
        norm = self.master.step(rate, self.step)
        self._check_finite("gradient norm", norm, first)
        self.step += 1
        if self.step % self.config.log_steps == 0:
            names = ("loss", "regression", "classification", "agreement")
            values = dict(zip(names, (round(x, 5) for x in parts.tolist()), strict=True))
            epochs = self.stream.epochs(self.step * self.config.accumulate)
            self._log("train", **values, learning_rate=rate, gradient_norm=norm, epochs=epochs)

    def _check_finite(self, what: str, value: float, number: int) -> None:
        if not math.isfinite(value):
            rows = ", ".join(self.stream.row_ids(number))
            raise NumericsError(
                f"training: {what} is {value} at step {self.step}, batch {number} (rows {rows}); the last checkpoint "
                f"in {self.output} is kept: look at these rows, or start again with a lower learning rate or fp32"
            )

    def evaluate(self) -> None:
        """Decode with the averaged weights, or with the weights themselves where none are averaged."""
        if self._evaluator is None:
            return
        self.master.load(self.master.weights if self.master.average is None else self.master.average)
        try:
            self._log("decode", weights="raw" if self.master.average is None else "ema", **self._evaluator())
        finally:
            self.master.load(self.master.weights)

    def checkpoint(self) -> None:
        """Write a checkpoint and the exports, each under a temporary name first.

        Raises:
            CheckpointError: they cannot be written.
        """
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "master": self.master.state_dict(),
        }
        weights = {"raw": self.master.weights, "ema": self.master.average}
        try:
            write_atomically(self.output / CHECKPOINT_NAME, lambda path: torch.save(state, path))
            for name, values in weights.items():
                if values is not None:
                    self.head.save_pretrained(self.output / "export" / name, self.master.named(values))
        except (OSError, RuntimeError, SafetensorError) as error:  # of torch.save, a full disk is a RuntimeError
            raise CheckpointError(
                f"training: {self.output} cannot be written ({error}); the last checkpoint is kept: make room or "
                "permit writing, then go on from it"
            ) from error
        self._log("checkpoint")

    def resume(self) -> None:
        """Continue from the output directory's checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        path = self.output / CHECKPOINT_NAME
        if not path.is_file():
            raise CheckpointError(f"resume: expected {path}, got no such file; start the run anew")
        state = torch.load(path, weights_only=True)
        self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]
        self.master.load_state_dict(state["master"])
        self._log("resume")

    def _request_stop(self, *_: Any) -> None:
        self._stop = True

    def _log(self, kind: str, **values: Any) -> None:
        line = {"kind": kind, "step": self.step, "minutes": round(self.seconds / 60.0, 3), "tokens": self.tokens}
        with (self.output / "metrics.jsonl").open("a", encoding="utf-8") as out:
            out.write(json.dumps({**line, **values}) + "\n")
