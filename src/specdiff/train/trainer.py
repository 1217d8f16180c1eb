"""Training a denoiser on one machine: low-precision weights, fp32 masters, a schedule by time, and safe restarts."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from specdiff.errors import CheckpointError, InputError, NumericsError
from specdiff.files import write_atomically
from specdiff.models.denoiser import BlockCausalDenoiser
from specdiff.objectives.base import Objective, Windows
from specdiff.objectives.masked import MaskedCrossEntropy
from specdiff.train.acceptance import measure_acceptance
from specdiff.train.features import Features, no_features
from specdiff.train.packed import packed_window_states
from specdiff.train.windows import AnswerRow, WindowStream, label_table

CHECKPOINT_NAME = "checkpoint.pt"
Evaluator = Callable[[Mapping[str, Tensor]], Mapping[str, Any]]
"""Measures weights, given by name; what it returns goes into the metrics."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How to train.

    Attributes:
        minutes: budget of training time; the learning rate reaches its floor when it is used up.
        steps: stop after this many steps, if given, and schedule by steps instead of by time.
        learning_rate: peak.
        warmup: fraction of the budget spent rising to the peak.
        floor: final learning rate as a fraction of the peak.
        weight_decay: for matrices; vectors have none.
        betas: AdamW's.
        clip: largest gradient norm.
        ema_decay: of the averaged weights; 0 for none.
        accumulate: batches whose gradients make one step.
        log_steps: steps between metrics lines.
        checkpoint_minutes: time between checkpoints.
        evaluate_minutes: time between evaluations.
        seed: for the trainer's own randomness.
    """

    minutes: float = 60.0
    steps: int | None = None
    learning_rate: float = 8e-4
    warmup: float = 0.03
    floor: float = 0.02
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    ema_decay: float = 0.99
    accumulate: int = 1
    log_steps: int = 10
    checkpoint_minutes: float = 5.0
    evaluate_minutes: float = 8.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject budgets and rates that cannot be used."""
        for name in (
            "minutes",
            "learning_rate",
            "clip",
            "checkpoint_minutes",
            "evaluate_minutes",
            "log_steps",
            "accumulate",
        ):
            if not getattr(self, name) > 0:
                raise InputError(f"{name}: expected a positive number, got {getattr(self, name)}")
        if not 0.0 <= self.ema_decay < 1.0:
            raise InputError(f"ema_decay: expected a number in [0, 1), got {self.ema_decay}")

    def rate(self, progress: float) -> float:
        """Return the learning rate when `progress` (0 to 1) of the budget is used up."""
        if progress < self.warmup:
            return self.learning_rate * max(progress, 1e-4) / self.warmup
        share = min(1.0, (progress - self.warmup) / max(1.0 - self.warmup, 1e-9))
        cosine = 0.5 * (1.0 + math.cos(math.pi * share))
        return self.learning_rate * (self.floor + (1.0 - self.floor) * cosine)


class MasterWeights:
    """fp32 copies that the optimiser works on, beside the weights the model computes with."""

    def __init__(self, model: torch.nn.Module, config: TrainerConfig) -> None:
        """Copy the model's weights and make the optimiser.

        Args:
            model: whose parameters to train.
            config: rates, decay and clipping.
        """
        self._model = [p for p in model.parameters() if p.requires_grad]
        self.names = [n for n, p in model.named_parameters() if p.requires_grad]
        self.weights = [p.detach().float().clone() for p in self._model]
        self.average = [w.clone() for w in self.weights] if config.ema_decay else None
        self._config = config
        groups = [
            {"params": [w for w in self.weights if w.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [w for w in self.weights if w.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)

    def step(self, rate: float, step: int) -> float:
        """Update masters, averages and the model's weights from the model's gradients.

        Args:
            rate: learning rate.
            step: steps done before this one; young averages forget faster.

        Returns:
            The gradient norm before clipping; where it is not finite, nothing was changed.
        """
        for weight, param in zip(self.weights, self._model, strict=True):
            weight.grad = torch.zeros_like(weight) if param.grad is None else param.grad.float()
            param.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.weights, self._config.clip)
        if not math.isfinite(norm):
            return float(norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if self.average is not None:
            decay = min(self._config.ema_decay, (1 + step) / (10 + step))
            for mean, weight in zip(self.average, self.weights, strict=True):
                mean.lerp_(weight, 1.0 - decay)
        self.load(self.weights)
        return float(norm)

    def load(self, values: Sequence[Tensor]) -> None:
        """Put fp32 values into the model's weights."""
        _copy_into(self._model, values)

    def named(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return values by parameter name."""
        return dict(zip(self.names, values, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs."""
        return {"weights": self.weights, "average": self.average, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        _copy_into(self.weights, state["weights"])
        if self.average is not None and state["average"] is not None:
            _copy_into(self.average, state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.load(self.weights)


class DenoiserTrainer:
    """The training loop.

    Files under the output directory: ``metrics.jsonl`` (one object a line), ``checkpoint.pt`` (to resume),
    ``export/raw`` and ``export/ema`` (denoisers to draft with).
    """

    def __init__(
        self,
        denoiser: BlockCausalDenoiser,
        stream: WindowStream,
        held_out: Sequence[AnswerRow],
        output: str | Path,
        config: TrainerConfig,
        *,
        features: Features = no_features,
        objective: Objective | None = None,
        evaluator: Evaluator | None = None,
        nodes: int = 24,
    ) -> None:
        """Prepare a run.

        Args:
            denoiser: to train, with the blockwise attention set.
            stream: the batches.
            held_out: T = 0 answers to measure acceptance on; may be empty.
            output: directory, created if needed.
            config: how to train.
            features: makes the target's states, for denoisers that read them.
            objective: one that reads labels only; None = cross-entropy over the whole window.
            evaluator: measures the weights beside the replay of ``held_out``, whenever that is due.
            nodes: of the tree that the replay measures.

        Raises:
            InputError: the objective needs what this loop does not make.
        """
        self.nodes = nodes
        self.objective = objective or MaskedCrossEntropy()
        if self.objective.needs_target or self.objective.needs_masking:
            raise InputError.of(
                "objective",
                expected="one that reads whole masked windows and their labels",
                got=self.objective.name,
                remedy="use cross_entropy, d_pace, streak, sampled_streak or tree_presence",
            )
        self.features, self._evaluator = features, evaluator
        self.denoiser, self.stream, self.held_out, self.config = denoiser, stream, held_out, config
        self.output = Path(output)
        self.output.mkdir(parents=True, exist_ok=True)
        self.master = MasterWeights(denoiser, config)
        self.labels_of = label_table(denoiser.draft_vocab, denoiser.config.vocab_size)
        self.step, self.seconds, self.windows = 0, 0.0, 0
        self._stop = False
        torch.manual_seed(config.seed)

    @property
    def progress(self) -> float:
        """Share of the budget used up."""
        if self.config.steps is not None:
            return self.step / self.config.steps
        return self.seconds / (60.0 * self.config.minutes)

    def run(self) -> None:
        """Train until the budget is used up, or until SIGTERM or SIGINT; leave a checkpoint and exports behind.

        Raises:
            NumericsError: a loss or gradient is not finite; no weight was changed by it, and the last checkpoint stays.
            CheckpointError: a checkpoint cannot be written; the last one stays.
        """
        handlers = {s: signal.signal(s, self._request_stop) for s in (signal.SIGTERM, signal.SIGINT)}
        due_checkpoint = self.seconds + 60.0 * self.config.checkpoint_minutes
        due_evaluation = self.seconds
        self.denoiser.train()
        last, first = time.perf_counter(), True
        try:
            while self.progress < 1.0 and not self._stop:
                if self.seconds >= due_evaluation:
                    self.evaluate()
                    due_evaluation = self.seconds + 60.0 * self.config.evaluate_minutes
                self._train_step()
                now = time.perf_counter()
                if not first:  # which may compile for minutes
                    self.seconds += now - last
                first, last = False, now
                if self.seconds >= due_checkpoint:
                    self.checkpoint()
                    due_checkpoint = self.seconds + 60.0 * self.config.checkpoint_minutes
            self.checkpoint()
            if not self._stop:
                self.evaluate()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _train_step(self) -> None:
        started = time.perf_counter()
        share, loss, drawn = 1.0 / self.config.accumulate, 0.0, 0
        scored, log_q, correct = (torch.zeros(self.denoiser.window) for _ in range(3))  # by offset
        first = self.step * self.config.accumulate
        for number in range(first, first + self.config.accumulate):
            batch = self.stream.batch(number)
            states = packed_window_states(self.denoiser, batch, features=self.features(batch.context))
            windows = Windows(
                hidden=states.flatten(0, 1), head_weight=self.denoiser.head_weight, labels=batch.labels.flatten(0, 1)
            )
            result = self.objective.loss(windows)
            (result.loss * share).backward()
            self._check_finite("loss", float(result.loss.detach()), number)
            loss += float(result.loss.detach()) * share
            drawn += batch.num_windows
            scored += result.scored.sum(0).cpu()
            log_q += result.log_q.sum(0).cpu()
            correct += result.correct.sum(0).cpu()
        rate = self.config.rate(self.progress)
        norm = self.master.step(rate, self.step)
        self._check_finite("gradient norm", norm, first)
        self.step += 1
        self.windows += drawn
        if self.step % self.config.log_steps == 0:
            count = scored.clamp_min(1)
            nll, hits = -log_q / count, correct / count
            self._log(
                "train",
                loss=loss,
                learning_rate=rate,
                gradient_norm=norm,
                windows_per_minute=60.0 * drawn / (time.perf_counter() - started),
                epochs=self.stream.epochs(self.step * self.config.accumulate),
                nll_by_offset=[round(x, 4) for x in nll.tolist()],
                correct_by_offset=[round(x, 4) for x in hits.tolist()],
            )

    def _check_finite(self, what: str, value: float, number: int) -> None:
        if not math.isfinite(value):
            rows = ", ".join(self.stream.row_ids(number))
            raise NumericsError(
                f"training: {what} is {value} at step {self.step}, batch {number} (rows {rows}); the last checkpoint "
                f"in {self.output} is kept: look at these rows, or start again with a lower learning rate or fp32"
            )

    def evaluate(self) -> None:
        """Measure acceptance on the held-out answers, of the averaged weights if there are any."""
        name = "raw" if self.master.average is None else "ema"
        weights = self.master.weights if self.master.average is None else self.master.average
        if self.held_out:
            self.master.load(weights)
            result = measure_acceptance(
                self.denoiser, self.held_out, self.labels_of, tree_nodes=self.nodes, features=self.features
            )
            self.master.load(self.master.weights)
            self._log("evaluate", weights=name, **asdict(result))
        if self._evaluator is not None:
            self._log("decode", weights=name, **self._evaluator(self.master.named(weights)))

    def checkpoint(self) -> None:
        """Write a checkpoint and the exports, each under a temporary name first.

        Raises:
            CheckpointError: they cannot be written.
        """
        try:
            self._write_checkpoint()
        except (OSError, RuntimeError, SafetensorError) as error:  # of torch.save, a full disk is a RuntimeError
            raise CheckpointError(
                f"training: {self.output} cannot be written ({error}); the last checkpoint is kept: make room or "
                "permit writing, then go on from it"
            ) from error
        self._log("checkpoint")

    def _write_checkpoint(self) -> None:
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "windows": self.windows,
            "master": self.master.state_dict(),
            "rng": torch.get_rng_state(),
        }
        write_atomically(self.output / CHECKPOINT_NAME, lambda path: torch.save(state, path))
        self.denoiser.save_pretrained(self.output / "export" / "raw", self.master.named(self.master.weights))
        if self.master.average is not None:
            self.denoiser.save_pretrained(self.output / "export" / "ema", self.master.named(self.master.average))

    def resume(self) -> None:
        """Continue from the output directory's checkpoint.

        Raises:
            ValueError: there is none.
        """
        path = self.output / CHECKPOINT_NAME
        if not path.is_file():
            raise CheckpointError(f"resume: expected {path}, got no such file; start without --resume")
        state = torch.load(path, weights_only=True)
        self.step, self.seconds, self.windows = state["step"], state["seconds"], state["windows"]
        self.master.load_state_dict(state["master"])
        torch.set_rng_state(state["rng"])
        self._log("resume")

    def _request_stop(self, *_: Any) -> None:
        self._stop = True

    def _log(self, kind: str, **values: Any) -> None:
        line = {"kind": kind, "step": self.step, "minutes": round(self.seconds / 60.0, 3), "windows": self.windows}
        with (self.output / "metrics.jsonl").open("a", encoding="utf-8") as out:
            out.write(json.dumps({**line, **values}) + "\n")


@torch.no_grad()
def _copy_into(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into tensors, whatever the dtypes."""
    for place, value in zip(places, values, strict=True):
        place.copy_(value)
