"""Names of weights: from a published checkpoint's to those of the transformers module that runs them, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KeyMap:
    """Renames module paths; names it does not know stay as they are.

    Attributes:
        modules: paths outside the layers, published -> ours.
        layers: path of the list of layers, published and ours.
        inner: paths inside a layer, published -> ours.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    layers: tuple[str, str] = ("model.layers", "model.layers")
    inner: Mapping[str, str] = field(default_factory=dict)

    def ours(self, key: str) -> str:
        """The name in our module of a published name such as ``model.transformer.blocks.3.ff_out.weight``."""
        return _rename(key, self.modules, self.layers, self.inner)

    def published(self, key: str) -> str:
        """The inverse of `ours`."""
        modules = {ours: published for published, ours in self.modules.items()}
        inner = {ours: published for published, ours in self.inner.items()}
        return _rename(key, modules, (self.layers[1], self.layers[0]), inner)

    def our_leaf(self, name: str) -> str:
        """The last component in our module of a bare published component (``ff_proj`` inside a layer -> ``gate_proj``).

        LoRA's ``target_modules`` name linear layers this way. A component that exists both inside the layers and
        outside means the one inside.
        """
        for published, ours in (*self.inner.items(), *self.modules.items()):
            if published.rsplit(".", 1)[-1] == name:
                return ours.rsplit(".", 1)[-1]
        return name


def _rename(key: str, modules: Mapping[str, str], layers: tuple[str, str], inner: Mapping[str, str]) -> str:
    before, after = layers
    if key.startswith(before + "."):
        index, _, rest = key[len(before) + 1 :].partition(".")
        return f"{after}.{index}.{_prefix(rest, inner)}"
    return _prefix(key, modules)


def _prefix(path: str, table: Mapping[str, str]) -> str:
    for old, new in table.items():
        if path == old or path.startswith(old + "."):
            return new + path[len(old) :]
    return path


LLADA = KeyMap(
    modules={
        "model.transformer.wte": "model.embed_tokens",
        "model.transformer.ln_f": "model.norm",
        "model.transformer.ff_out": "lm_head",
    },
    layers=("model.transformer.blocks", "model.layers"),
    inner={
        "attn_norm": "input_layernorm",
        "q_proj": "self_attn.q_proj",
        "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj",
        "attn_out": "self_attn.o_proj",
        "ff_norm": "post_attention_layernorm",
        "ff_proj": "mlp.gate_proj",
        "up_proj": "mlp.up_proj",
        "ff_out": "mlp.down_proj",
    },
)
"""LLaDA's names (an OLMo heritage): ``ff_proj`` is the gate, the ``ff_out`` outside the blocks is the output head."""

DDM_WRAPPER = KeyMap(
    modules={"embed_tokens": "model.embed_tokens", "denoise_model.norm": "model.norm"},
    layers=("denoise_model.layers", "model.layers"),
)
"""DiffuLLaMA's training wrapper; the released weights have plain LLaMA names."""

PLAIN = KeyMap()
"""Names as in transformers: Dream, DiffuCoder, SDAR."""
