"""From names to a running pair: ``load()`` gives the embedded default, every part can be named."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from specdiff.corpus.identity import tokenizer_fingerprint
from specdiff.decoder import Settings, SpeculativeDecoder
from specdiff.drafters.autoregressive import AutoregressiveDrafter
from specdiff.drafters.base import Drafter
from specdiff.drafters.block_causal import BlockCausalSource
from specdiff.drafters.cross_tokenizer import CrossTokenizerDrafter
from specdiff.drafters.eagle import EagleDrafter
from specdiff.drafters.ensemble import EnsembleDrafter, Member
from specdiff.drafters.marginal import MarginalDrafter, MarginalSource
from specdiff.drafters.masked import MaskedSource
from specdiff.drafters.multistep import MultiStepDrafter
from specdiff.drafters.ngram import NgramDrafter
from specdiff.drafters.registry import describe
from specdiff.drafters.scoring import Scoring
from specdiff.drafters.vocabulary import check_same_vocabulary
from specdiff.drafters.windowed import WindowedDrafter, fit_context
from specdiff.errors import DownloadError, InputError, ModelError, PairingError
from specdiff.hub.catalog import CATALOG
from specdiff.hub.progress import ProgressCallback, ignore
from specdiff.hub.safety import check_folder, check_weights, read_json
from specdiff.hub.store import ModelStore
from specdiff.models.denoiser import BlockCausalDenoiser
from specdiff.models.diffusion.families import is_diffusion
from specdiff.models.diffusion.model import DiffusionLM
from specdiff.models.diffusion.tokenizer import load_tokenizer
from specdiff.models.eagle import EagleHead, is_eagle
from specdiff.models.load_target import dtype_of, load_target
from specdiff.models.prepacked import prepack as prepack_layers
from specdiff.models.tables import embedding_table, output_table
from specdiff.models.target import CausalTarget
from specdiff.ngram.load import load_scorer
from specdiff.ngram.mixture import InterpolatedScorer
from specdiff.ngram.prompt import PromptScorer

NGRAM_ORDER = 3
"""Of the model that learns from the text, as DiffuSpec's."""

DEFAULT_TARGET = "smollm2-135m"
DEFAULT_DENOISER = "smollm2-135m-denoiser"


def load(
    target: str = DEFAULT_TARGET,
    drafter: str = "default",
    *,
    dtype: str | torch.dtype = "auto",
    drafter_dtype: str | torch.dtype = "auto",
    device: str | None = None,
    device_map: str | None = None,
    tf32: bool = False,
    trust_remote_code: bool = False,
    steps: int = 1,
    order: str = "left_to_right",
    family: str | None = None,
    ngram: str | Path | None = None,
    settings: Settings | None = None,
    pull: bool = True,
    progress: ProgressCallback = ignore,
    prepack: bool = True,
) -> SpeculativeDecoder:
    """Load a target and a drafter.

    Args:
        target: catalog name (``specdiff models list``), a local folder, or a Hugging Face id.
        drafter: ``"default"`` (the denoiser that ships with the default target), ``"none"``, ``"ngram"``, a folder or
            id of weights (block-causal denoiser, EAGLE head, masked diffusion LM, or any causal LM), or several joined
            by ``+``.
        dtype: of the target: ``"auto"``, ``"bf16"``, ``"fp16"``, ``"fp32"`` or a torch dtype. drafter_dtype: the same
            for the drafter; ``"auto"`` = the target's.
        device: ``"cpu"``, ``"cuda"``, ...; None = the best there is. device_map: accelerate's, e.g. ``"auto"``.
        tf32: allow TF32 products on CUDA. trust_remote_code: run code that comes with the target's checkpoint.
        steps, order: denoising steps of a masked diffusion LM and the order of unmasking. family: its family, where its
            configuration does not say (``"diffullama"``).
        ngram: n-gram model that the shape `CausalPaths` asks, beside a one-step diffusion drafter: ``"prompt"`` (it
            learns from each text itself), an ARPA file of the target's token ids (``specdiff ngram train``), or
            ``"prompt+FILE"`` (both, half each).
        settings: see `Settings`. pull: fetch a catalog target that is not stored yet. progress: told how that goes.
        prepack: on CPUs, keep second copies of the weights, of target and drafter, for speed; see `load_target`.

    Raises:
        InputError: a name, option or pairing is wrong. CheckpointError, UnsupportedModelError: a model cannot be used.
        DownloadError: fetching failed.
    """
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
    loader = _DrafterLoader(store, loaded, tokenizer, drafter_dtype, steps, order, family, prepack, ngram)
    return SpeculativeDecoder(loaded, loader.load(drafter), tokenizer, settings)


def default_denoiser() -> Path:
    """Folder of the denoiser that ships with the package."""
    return Path(str(resources.files("specdiff"))) / "assets" / DEFAULT_DENOISER


def scoring(ngram: str | Path, vocab_size: int, tokenizer: PreTrainedTokenizerBase) -> Scoring:
    """The n-gram model that ``load(ngram=...)`` names.

    Args:
        ngram: see `load`. vocab_size: V. tokenizer: the target's; a file must hold its ids.

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
        steps: int,
        order: str,
        family: str | None,
        prepack: bool,
        ngram: str | Path | None,
    ) -> None:
        self._scoring = None if ngram is None else scoring(ngram, target.vocab_size, tokenizer)
        self._prepack = prepack
        self._store, self._target, self._tokenizer = store, target, tokenizer
        self._dtype = target.model.dtype if dtype == "auto" else dtype_of(dtype)
        self._device = embedding_table(target.model).device
        self._steps, self._order, self._family = steps, order, family

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
                    expected=f"a folder, a model id, or one of these kinds:\n{describe()}\n",
                    got=name,
                    remedy="check the name",
                )
            return self._autoregressive(self._store.resolve(name, pull=True).source, name)
        config = read_json(folder / "config.json")
        if "base_model_type" in config:
            check_weights(folder)
            return self._denoiser(folder, is_default=name == "default")
        if is_eagle(folder, config):
            return self._eagle(folder)
        # published code of diffusion LMs is mapped to transformers' own modules, never run
        if self._family is not None or is_diffusion(config):
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
        return fit_context(self._marginal(source), source.context, target_context=self._target.context)

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
        lm = DiffusionLM.from_pretrained(folder, family=self._family, dtype=self._dtype, device=self._device)
        if self._prepack:
            prepack_layers(lm)
        source = MaskedSource(lm, vocab_size=self._common(load_tokenizer(folder), lm.config.vocab_size), name=name)
        if self._steps > 1:
            return MultiStepDrafter(source, steps=self._steps, order=self._order)
        return self._marginal(source)

    def _marginal(self, source: MarginalSource) -> MarginalDrafter:
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
