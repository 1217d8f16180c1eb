"""Settings x prompts: every prompt is decoded with every setting in turn, so that a drifting machine hurts all alike.

The seam to a larger harness is `run_grid`: ready decoders come in, what was measured goes out as rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specdiff.bench.tune import identity, tune
from specdiff.control.plan import Plan
from specdiff.control.plan_file import load_plan, save_plan
from specdiff.corpus.identity import tokenizer_fingerprint
from specdiff.decoder import Generation, SpeculativeDecoder
from specdiff.drafters.base import Drafter
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.drafters.multistep import MultiStepDrafter
from specdiff.drafters.windowed import WindowedDrafter
from specdiff.errors import InputError
from specdiff.loading import load_drafter, scoring
from specdiff.models.layer_cut import target_fingerprint
from specdiff.models.tables import embedding_table, output_table
from specdiff.models.target import CausalTarget
from specdiff.repro.progress import Progress, silent
from specdiff.repro.prompts import TaskPrompt
from specdiff.repro.rows import RowFile
from specdiff.repro.settings import DrafterSpec, Setting
from specdiff.repro.timed import SourceWatch, network_of, watch_source
from specdiff.types import Round

PLAN = "plan.json"
_WARM_UP = 8


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """A setting that is ready to decode, and the clock of its drafter's passes."""

    setting: Setting
    decoder: SpeculativeDecoder
    watch: SourceWatch


def run_grid(
    file: RowFile,
    decodings: Sequence[Decoding],
    prompts: Sequence[tuple[TaskPrompt, Tensor]],
    *,
    tokens: int,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = silent,
) -> None:
    """Measure what the file does not have yet.

    Args:
        file: takes the rows. decodings: the settings. prompts: with their ids [L]. tokens: most new ones of each.
        seed: of everything drawn. clock: seconds. progress: told after every row.
    """
    missing = {(p.id, d.setting.name) for p, _ in prompts for d in decodings if (p.id, d.setting.name) not in file.rows}
    total = len(prompts) * len(decodings)
    progress("measuring", total - len(missing), total)
    for decoding in decodings:
        if any(name == decoding.setting.name for _, name in missing):
            decoding.decoder.generate(prompts[0][1], max_new_tokens=_WARM_UP, temperature=decoding.setting.temperature)
    for number, (prompt, ids) in enumerate(prompts):
        turn = number % len(decodings)
        for decoding in (*decodings[turn:], *decodings[:turn]):
            key = (prompt.id, decoding.setting.name)
            if key in missing:
                file.add(key, {"group": prompt.group, **measure(decoding, ids, tokens=tokens, seed=seed, clock=clock)})
                missing.remove(key)
                progress("measuring", total - len(missing), total)


def measure(decoding: Decoding, ids: Tensor, *, tokens: int, seed: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Decode one prompt; what a row holds of it."""
    before = decoding.watch.seconds
    began = clock()
    result = decoding.decoder.generate(
        ids, max_new_tokens=tokens, temperature=decoding.setting.temperature, seed=seed, clock=clock
    )
    seconds = clock() - began
    assert isinstance(result, Generation)
    totals = result.totals
    return {
        "tokens": list(result.tokens),
        "finish": result.finish.value,
        "seconds": seconds,
        "rounds": totals.rounds,
        "passes": totals.target_passes,
        "accepted": totals.accepted,
        "proposed": totals.proposed,
        "asked_by_position": _by_position(result.rounds, lambda r: r.proposed),
        "accepted_by_position": _by_position(result.rounds, lambda r: r.accepted),
        "draft_seconds": totals.draft_seconds,
        "denoise_seconds": decoding.watch.seconds - before,
        "target_seconds": totals.target_seconds,
        "verify_seconds": totals.verify_seconds,
    }


def _by_position(rounds: Sequence[Round], reach: Callable[[Round], int]) -> list[int]:
    deepest = max((r.proposed for r in rounds), default=0)
    return [sum(reach(r) >= j for r in rounds) for j in range(1, deepest + 1)]


class Pair:
    """A loaded target and the drafters that a study asks for, each loaded once.

    Args:
        base: a decoder with the target and its tokenizer; its own drafter is not used.
        folder: where the planner's plan is kept, if a setting needs one.
    """

    def __init__(self, base: SpeculativeDecoder, folder: Path) -> None:
        self.base, self._folder = base, folder
        self._drafters: dict[DrafterSpec, tuple[Drafter | None, SourceWatch]] = {}

    def drafter(self, spec: DrafterSpec) -> Drafter | None:
        """The drafter, loaded on first use."""
        return self._loaded(spec)[0]

    def window(self, spec: DrafterSpec, default: int) -> int:
        """Longest draft of a drafter, ``default`` where it has no limit."""
        drafter = self.drafter(spec)
        limit = None if drafter is None else drafter.max_gamma
        return default if limit is None else limit

    def decodings(self, settings: Sequence[Setting], prompts: Sequence[Tensor]) -> list[Decoding]:
        """The settings, ready to decode.

        Args:
            settings: names differ. prompts: ids to measure the planner's costs on, where it has no plan yet.
        """
        assert len({s.name for s in settings}) == len(settings), "names of settings differ"
        ready: list[Decoding] = []
        for setting in settings:
            drafter, watch = (None, SourceWatch()) if setting.drafter is None else self._loaded(setting.drafter)
            plan = self._plan(drafter, prompts) if setting.controller == "planner" else None
            ready.append(Decoding(setting=setting, decoder=setting.decoder(self.base, drafter, plan), watch=watch))
        return ready

    def facts(self) -> dict[str, Any]:
        """What identifies the target."""
        target = self.base.target
        facts: dict[str, Any] = {"name": Path(target.name).name}
        if isinstance(target, CausalTarget):
            facts |= {
                "tables": target_fingerprint(embedding_table(target.model), output_table(target.model)),
                "dtype": str(target.model.dtype).removeprefix("torch."),
            }
        if self.base.tokenizer is not None:
            facts["tokenizer"] = tokenizer_fingerprint(self.base.tokenizer)
        return facts

    def encode(self, prompts: Sequence[TaskPrompt]) -> list[tuple[TaskPrompt, Tensor]]:
        """The prompts' ids, in the chat template where there is one."""
        chat = bool(self.base.tokenizer is not None and getattr(self.base.tokenizer, "chat_template", None))
        return [(p, self.base.encode(p.text, chat=chat)) for p in prompts]

    def _loaded(self, spec: DrafterSpec) -> tuple[Drafter | None, SourceWatch]:
        if spec not in self._drafters:
            plain = DrafterSpec(name=spec.name)
            if plain not in self._drafters:
                drafter = load_drafter(spec.name, self.base.target, self.base.tokenizer)
                self._drafters[plain] = (drafter, watch_source(drafter))
            drafter, watch = self._drafters[plain]
            self._drafters[spec] = (self._variant(drafter, spec), watch)
        return self._drafters[spec]

    def _variant(self, drafter: Drafter | None, spec: DrafterSpec) -> Drafter | None:
        """The same network in several steps, or beside an n-gram model: no second copy of its weights."""
        if spec.steps == 1 and spec.ngram is None:
            return drafter
        inner = drafter.inner if isinstance(drafter, WindowedDrafter) else drafter
        tokenizer = self.base.tokenizer
        if not isinstance(inner, MarginalDrafter) or (spec.steps > 1 and spec.ngram is not None) or tokenizer is None:
            raise InputError.of(
                f"drafter {spec.label!r}", expected="a diffusion drafter, for several steps or beside an n-gram model",
                got={"steps": spec.steps, "ngram": spec.ngram}, remedy="use such a drafter, and one of the two",
            )  # fmt: skip
        if spec.ngram is not None:
            target = self.base.target
            scorer = scoring(spec.ngram, target.vocab_size, tokenizer)
            made: Drafter = MarginalDrafter(inner.source, scorer=scorer, eos_ids=target.eos_ids)
        else:
            made = MultiStepDrafter(network_of(inner), steps=spec.steps)
        return WindowedDrafter(made, context=drafter.context) if isinstance(drafter, WindowedDrafter) else made

    def _plan(self, drafter: Drafter | None, prompts: Sequence[Tensor]) -> Plan:
        decoder = SpeculativeDecoder(self.base.target, drafter, self.base.tokenizer)
        names, path = identity(decoder), self._folder / PLAN
        if not path.is_file():
            save_plan(path, tune(decoder, list(prompts[:4]), new_tokens=32).plan, names)
        return load_plan(path, names)
