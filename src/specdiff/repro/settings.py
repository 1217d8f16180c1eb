"""One way to decode, as plain data that a header can freeze, and the decoder it stands for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specdiff.bench.tune import planned
from specdiff.checking import integer, real
from specdiff.control.adaptive_length import LengthRule
from specdiff.control.base import FixedBudget
from specdiff.control.plan import Plan
from specdiff.decoder import Settings, SpeculativeDecoder
from specdiff.drafters.base import Drafter
from specdiff.errors import InputError
from specdiff.hub.fingerprint import model_fingerprint
from specdiff.loading import default_denoiser
from specdiff.types import Budget, Chain, Shape

PLAIN = "plain"
"""Name of the setting that all others are compared with: the same loop without a drafter."""
NEAR_ARGMAX = 1e-4
"""Draft temperature at which a sampled chain is the chain of argmaxes."""


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """Which drafter, and how it is used.

    Attributes:
        name: as for `specdiff.load`. steps: denoising steps. ngram: its n-gram model, see `specdiff.load`.
        label: what records call it; "" = the name, of a folder its last part.
    """

    name: str
    steps: int = 1
    ngram: str | None = None
    label: str = ""

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", Path(self.name).name if Path(self.name).is_dir() else self.name)

    def to_json(self) -> dict[str, Any]:
        """Plain data, for the header: what it is, not where it lies."""
        return {"label": self.label, "steps": self.steps, "ngram": self.ngram and Path(self.ngram).name}

    def weights(self) -> str | None:
        """Fingerprint of its weights, where they are in a folder."""
        folder = default_denoiser() if self.name == "default" else Path(self.name)
        return model_fingerprint(folder) if folder.is_dir() else None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to decode.

    Attributes:
        name: unique in a grid. drafter: None = plain decoding.
        gamma, shape, draft_temperature: of the budget; ignored by the planner, which has its own.
        rule: a verification rule, or ``"auto"``. controller: ``"fixed"``, ``"adl"`` or ``"planner"``.
        temperature: the target's.

    Raises:
        InputError: a number is out of range, or there is no such controller.
    """

    name: str
    drafter: DrafterSpec | None = None
    gamma: int = 8
    shape: Shape = field(default_factory=Chain)
    draft_temperature: float = 1.0
    rule: str = "auto"
    controller: str = "fixed"
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.controller not in ("fixed", "adl", "planner"):
            raise InputError.of(
                "controller", expected="fixed, adl or planner", got=self.controller, remedy="use one of these"
            )
        integer("gamma", self.gamma, 1, remedy="draft at least one token")
        real("temperature", self.temperature, lambda t: 0 <= t < float("inf"), expected=">= 0", remedy="0 = argmax")
        self.budget.validate()

    @property
    def budget(self) -> Budget:
        """What each round may draft."""
        return Budget(gamma=self.gamma, shape=self.shape, temperature=self.draft_temperature)

    def to_json(self) -> dict[str, Any]:
        """Plain data, for the header."""
        shape = {k: v for k, v in asdict(self.shape).items() if k != "size"}
        shape |= {"kind": type(self.shape).__name__}
        return asdict(self) | {"shape": shape, "drafter": None if self.drafter is None else self.drafter.to_json()}

    def decoder(self, base: SpeculativeDecoder, drafter: Drafter | None, plan: Plan | None) -> SpeculativeDecoder:
        """The decoder of this setting.

        Args:
            base: has the target and its tokenizer. drafter: the loaded one. plan: for the planner.

        Raises:
            InputError: the planner without a plan, or a window longer than the drafter's.
        """
        if drafter is None:
            return SpeculativeDecoder(base.target, None, base.tokenizer)
        limit = drafter.max_gamma
        if limit is not None and self.gamma > limit:
            raise InputError.of(
                f"setting {self.name!r}", expected=f"gamma of at most {limit}, the drafter's window", got=self.gamma,
                remedy="use a shorter one",
            )  # fmt: skip
        if self.controller == "planner":
            if plan is None:
                raise InputError.of(
                    "plan", expected="a plan for the planner", got=None, remedy="measure it: specdiff tune"
                )
            ruled = SpeculativeDecoder(base.target, drafter, base.tokenizer, Settings(rule=self.rule))
            return planned(ruled, plan, greedy=self.temperature == 0)
        scaled = LengthRule.scaled(self.gamma).controller
        settings = Settings(
            rule=self.rule, budget=self.budget, controller=FixedBudget if self.controller == "fixed" else scaled
        )
        return SpeculativeDecoder(base.target, drafter, base.tokenizer, settings)
