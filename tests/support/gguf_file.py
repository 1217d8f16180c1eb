"""A GGUF file of a Llama small enough to convert in a test."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, LAYERS, HEADS, MLP = 32, 2, 2, 64


def write_llama(path: Path, *, untied: bool = False, leave_out: str = "", nan: bool = False) -> dict[str, np.ndarray]:
    """Write the file, half of its matrices as Q4_1, and return its tensors as a reader dequantises them.

    Args:
        path: of the file.
        untied: store an output table beside the input table, as some tools do for tied models.
        leave_out: name of a tensor that is left out.
        nan: put a NaN into the first norm.
    """
    tokens = ["<|end|>", "<|start|>", "<|pad|>", *sorted(ByteLevel.alphabet()), "he", "Ġa"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny Llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(2)
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    if untied:
        shapes["output.weight"] = (len(tokens), HIDDEN)
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN // 2, HIDDEN),
            "attn_v": (HIDDEN // 2, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (MLP, HIDDEN),
            "ffn_up": (MLP, HIDDEN), "ffn_down": (HIDDEN, MLP),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    tensors: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        if nan and name == "output_norm.weight":
            values[3] = np.nan
        if name == leave_out:
            continue
        if "ffn" in name and len(shape) == 2:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
            values = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(name, values)
        tensors[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors
