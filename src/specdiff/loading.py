"""From names to a pair of models: the target, the drafter that suits it, and the tokenizer.

`SpeculativeDecoder.from_pretrained` puts the decoder around them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from specdiff.checking import integer
from specdiff.corpus.identity import tokenizer_fingerprint
from specdiff.drafters.autoregressive import AutoregressiveDrafter
from specdiff.drafters.base import Drafter
from specdiff.drafters.block_causal import BlockCausalSource
from specdiff.drafters.cross_tokenizer import CrossTokenizerDrafter
from specdiff.drafters.eagle import EagleDrafter
from specdiff.drafters.ensemble import EnsembleDrafter, Member
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.drafters.masked import MaskedSource
from specdiff.drafters.multistep import ORDERS, MultiStepDrafter
from specdiff.drafters.ngram import NgramDrafter
from specdiff.drafters.scoring import Scoring
from specdiff.drafters.vocabulary import check_same_vocabulary
from specdiff.drafters.windowed import WindowedDrafter, fit_context
from specdiff.errors import DownloadError, InputError, ModelError, PairingError
from specdiff.hub.catalog import CATALOG
from specdiff.hub.manifest import check_recorded
from specdiff.hub.progress import ProgressCallback
from specdiff.hub.safety import check_folder, check_weights, read_json
from specdiff.hub.store import ModelStore
from specdiff.models.denoiser import BlockCausalDenoiser
from specdiff.models.diffusion.families import is_diffusion
from specdiff.models.diffusion.loading import cast_parameters
from specdiff.models.diffusion.lora import merge_lora
from specdiff.models.diffusion.model import DiffusionLM
from specdiff.models.diffusion.tokenizer import load_tokenizer
from specdiff.models.eagle import EagleHead, is_eagle
from specdiff.models.load_target import dtype_of, load_target
from specdiff.models.prepacked import prepack as prepack_layers
from specdiff.models.tables import embedding_table, output_table
from specdiff.models.target import CausalTarget, Target
from specdiff.ngram.load import load_scorer
from specdiff.ngram.mixture import InterpolatedScorer
from specdiff.ngram.prompt import PromptScorer

NGRAM_ORDER = 3
"""Of the model that learns from the text, as DiffuSpec's."""

DEFAULT_TARGET = "smollm2-135m"
DEFAULT_DENOISER = "smollm2-135m-denoiser"


@dataclass(frozen=True, kw_only=True)
class DiffusionOptions:
    """What only masked diffusion LMs understand; see `SpeculativeDecoder.from_pretrained`."""

    steps: int = 1
    order: str = "left_to_right"
    family: str | None = None
    adapter: str | Path | None = None
    refresh: int | None = None

    def __post_init__(self) -> None:
        integer("steps", self.steps, 1, remedy="1 is the one-step drafter")
        if self.order not in ORDERS:
            raise InputError.of("order", expected=" or ".join(ORDERS), got=self.order, remedy="name one of these")
        if self.steps == 1 and self.order != "left_to_right":
            raise InputError.of(
                "order", expected="more than one step beside it", got=self.order, remedy="raise steps, or leave it out"
            )

    def given(self) -> dict[str, object]:
        """The options that are not at their default."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What a decoder is made of; no drafter = plain decoding."""

    target: CausalTarget
    drafter: Drafter | None
    tokenizer: PreTrainedTokenizerBase


def load_pair(
    target: str,
    drafter: str,
    *,
    dtype: str | torch.dtype,
    drafter_dtype: str | torch.dtype,
    device: str | None,
    device_map: str | None,
    tf32: bool,
    trust_remote_code: bool,
    steps: int,
    order: str,
    family: str | None,
    adapter: str | Path | None,
    refresh: int | None,
    ngram: str | Path | None,
    pull: bool,
    progress: ProgressCallback,
    prepack: bool,
) -> Pair:
    """Load a target and a drafter; arguments and errors as for `SpeculativeDecoder.from_pretrained`."""
    diffusion = DiffusionOptions(steps=steps, order=order, family=family, adapter=adapter, refresh=refresh)
    store = ModelStore()
    where = store.resolve(target, pull=pull, allow_remote_code=trust_remote_code, progress=progress)
    loaded, tokenizer = load_target(
        where.source,
        dtype=dtype,
        device=device,
        device_map=device_map,
        tf32=tf32,
        trust_remote_code=trust_remote_code,
        prepack=prepack,
    )
    loader = _DrafterLoader(store, loaded, tokenizer, drafter_dtype, diffusion, prepack, ngram)
    return Pair(target=loaded, drafter=loader.load(drafter), tokenizer=tokenizer)


def load_drafter(
    name: str,
    target: Target,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    steps: int = 1,
    ngram: str | Path | None = None,
    prepack: bool = True,
) -> Drafter | None:
    """A drafter for a target that is loaded already; it takes the target's dtype.

    Args:
        name, steps, ngram, prepack: as for `SpeculativeDecoder.from_pretrained`. target, tokenizer: a decoder's.

    Raises:
        InputError: the target is not a loaded model with its tokenizer (and all that `from_pretrained` raises).
    """
    if not isinstance(target, CausalTarget) or tokenizer is None:
        raise InputError.of(
            "target", expected="a loaded model and its tokenizer", got=target.name, remedy="make the decoder with load"
        )
    loader = _DrafterLoader(ModelStore(), target, tokenizer, "auto", DiffusionOptions(steps=steps), prepack, ngram)
    return loader.load(name)


def default_denoiser() -> Path:
    """Folder of the denoiser that ships with the package."""
    return Path(str(resources.files("specdiff"))) / "assets" / DEFAULT_DENOISER


def scoring(ngram: str | Path, vocab_size: int, tokenizer: PreTrainedTokenizerBase) -> Scoring:
    """The n-gram model that ``load(ngram=...)`` names.

    Args:
        ngram: see `SpeculativeDecoder.from_pretrained`. vocab_size: V.
        tokenizer: the target's; a file must hold its ids.

    Raises:
        InputError: there is no such file. CheckpointError: it is not sound. PairingError: of another tokenizer.
    """
    name = str(ngram)
    both = name.removeprefix("prompt+")
    learns, path = name == "prompt" or both != name, Path(both)

    def prompt() -> PromptScorer:
        return PromptScorer(vocab_size=vocab_size, order=NGRAM_ORDER)

    if name == "prompt":
        return prompt
    if not path.is_file():
        raise InputError.of(
            "ngram", expected="'prompt', an ARPA file, or prompt+FILE", got=name, remedy="see specdiff ngram train"
        )
    trained = load_scorer(path, tokenizer_fingerprint=tokenizer_fingerprint(tokenizer))
    return (lambda: InterpolatedScorer(prompt(), trained)) if learns else trained


class _DrafterLoader:
    """Loads drafters for one target."""

    def __init__(
        self,
        store: ModelStore,
        target: CausalTarget,
        tokenizer: PreTrainedTokenizerBase,
        dtype: str | torch.dtype,
        diffusion: DiffusionOptions,
        prepack: bool,
        ngram: str | Path | None,
    ) -> None:
        self._scoring = None if ngram is None else scoring(ngram, target.vocab_size, tokenizer)
        self._prepack = prepack
        self._store, self._target, self._tokenizer = store, target, tokenizer
        self._dtype = target.model.dtype if dtype == "auto" else dtype_of(dtype)
        self._device = embedding_table(target.model).device
        self._options = diffusion
        self._diffusion_members = self._stepping_members = 0

    def load(self, name: str) -> Drafter | None:
        """The drafter called ``name``; None for ``"none"``."""
        drafter = self._any(name)
        inner = drafter.inner if isinstance(drafter, WindowedDrafter) else drafter
        if self._scoring is not None and not isinstance(inner, MarginalDrafter):
            raise InputError.of(
                "ngram",
                expected="a one-step diffusion drafter beside an n-gram model",
                got=f"drafter {name!r}",
                remedy="leave ngram out, or use such a drafter alone",
            )
        for option, value in self._options.given().items():
            members = self._stepping_members if option in ("steps", "order") else self._diffusion_members
            if members == 0 or (option == "adapter" and members > 1):
                raise InputError.of(
                    option,
                    expected="a masked diffusion LM as drafter beside it (one alone for an adapter)",
                    got=f"{value} beside drafter {name!r}",
                    remedy="leave it out, or name the folder of such a drafter",
                )
        return drafter

    def _any(self, name: str) -> Drafter | None:
        if "+" in name and not Path(name).exists():
            members = [self._one(part) for part in name.split("+")]
            return EnsembleDrafter([Member(m) for m in members], name=name)
        return None if name == "none" else self._one(name)

    def _one(self, name: str) -> Drafter:
        if name == "ngram":
            return NgramDrafter(vocab_size=self._target.vocab_size)
        folder = default_denoiser() if name == "default" else Path(name)
        if not folder.is_dir():
            if "/" not in name and name not in CATALOG:
                raise InputError.of(
                    "drafter",
                    expected=f"'default', 'none', 'ngram', a catalog model ({', '.join(CATALOG)}), a folder or an id "
                    "like 'org/name', or several joined by '+'",
                    got=name,
                    remedy="check the name; `specdiff models list` shows what is on this disk",
                )
            return self._autoregressive(self._store.resolve(name, pull=True).source, name)
        config = read_json(folder / "config.json")
        check_recorded(folder, required=name == "default")
        if "base_model_type" in config:
            check_weights(folder)
            return self._denoiser(folder, is_default=name == "default")
        if is_eagle(folder, config):
            return self._eagle(folder)
        # published code of diffusion LMs is mapped to transformers' own modules, never run
        if self._options.family is not None or is_diffusion(config):
            return self._diffusion(folder, name)
        check_folder(folder)
        return self._autoregressive(str(folder), name)

    def _denoiser(self, folder: Path, *, is_default: bool) -> Drafter:
        model = self._target.model
        embedding = embedding_table(model).detach().to(self._dtype)
        head = output_table(model).detach().to(self._dtype)
        try:
            denoiser = BlockCausalDenoiser.from_pretrained(folder, embedding, head)
        except PairingError as error:
            if is_default:
                raise PairingError.of(
                    "drafter",
                    expected=f"the target {DEFAULT_TARGET!r} beside drafter 'default'",
                    got=self._target.name,
                    remedy="use drafter='ngram', or a drafter trained for this target",
                ) from error
            raise
        if self._prepack:
            denoiser.prepack()
        source = BlockCausalSource(denoiser)
        return fit_context(self._in_steps(source), source.context, target_context=self._target.context)

    def _eagle(self, folder: Path) -> Drafter:
        if self._dtype != self._target.model.dtype:
            raise InputError.of(
                "drafter_dtype",
                expected=f"{self._target.model.dtype}, the target's: an EAGLE head shares its table and LM head",
                got=self._dtype,
                remedy="leave it out",
            )
        head = EagleHead.from_pretrained(folder, self._target.model)
        if self._prepack:
            head.prepack()
        drafter = EagleDrafter(head)
        return fit_context(drafter, drafter.context, target_context=self._target.context)

    def _diffusion(self, folder: Path, name: str) -> Drafter:
        self._diffusion_members += 1
        options = self._options
        if options.adapter is None:
            lm = DiffusionLM.from_pretrained(folder, family=options.family, dtype=self._dtype, device=self._device)
        else:  # merged before anything is rounded
            lm = DiffusionLM.from_pretrained(folder, family=options.family, dtype=torch.float32, device="cpu")
            merge_lora(lm, options.adapter)
            cast_parameters(lm.backbone, self._dtype, self._device)
        if self._prepack:
            prepack_layers(lm)
        size = self._common(load_tokenizer(folder), lm.config.vocab_size)
        source = MaskedSource(lm, vocab_size=size, refresh=options.refresh, name=name)
        return self._in_steps(source)

    def _in_steps(self, source: MaskedSource | BlockCausalSource) -> MarginalDrafter | MultiStepDrafter:
        self._stepping_members += 1
        options = self._options
        if options.steps > 1:
            return MultiStepDrafter(source, steps=options.steps, order=options.order)
        return MarginalDrafter(source, scorer=self._scoring, eos_ids=self._target.eos_ids)

    def _autoregressive(self, source: str, name: str) -> Drafter:
        # a drafter's cache is cropped and its checkpoint can be faulty as a target's: the same checks
        try:
            loaded, tokenizer = load_target(
                source,
                dtype=self._dtype,
                device=self._device,
                attn_implementation="sdpa",
                tf32=bool(self._target.info.tf32),
                prepack=self._prepack,
            )
        except (ModelError, DownloadError) as error:
            raise type(error)(f"drafter {name!r}: {str(error).removeprefix('target: ')}") from error
        model = loaded.model
        plain = AutoregressiveDrafter(model, vocab_size=self._target.vocab_size, name=name)
        drafter = fit_context(plain, plain.context, target_context=self._target.context)
        try:
            self._common(tokenizer, output_table(model).shape[0])
        except PairingError:
            return CrossTokenizerDrafter(
                drafter,
                target_tokenizer=self._tokenizer,
                drafter_tokenizer=tokenizer,
                vocab_size=self._target.vocab_size,
                name=name,
            )
        return drafter

    def _common(self, tokenizer: PreTrainedTokenizerBase, size: int) -> int:
        return check_same_vocabulary(self._tokenizer, tokenizer, target_size=self._target.vocab_size, drafter_size=size)
