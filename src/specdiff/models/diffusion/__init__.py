"""Masked diffusion LMs as denoisers: Dream, DiffuCoder, LLaDA, DiffuLLaMA, SDAR."""

from specdiff.models.diffusion.base import MaskedDenoiser, Window, WindowSession
from specdiff.models.diffusion.config import MaskedDenoiserConfig
from specdiff.models.diffusion.families import FAMILIES, Family, is_diffusion
from specdiff.models.diffusion.lora import add_lora, merge_lora
from specdiff.models.diffusion.model import DiffusionLM
from specdiff.models.diffusion.probe import ProbeReport, ProbeState, copy_probe
from specdiff.models.diffusion.tokenizer import load_tokenizer

__all__ = [
    "FAMILIES",
    "DiffusionLM",
    "Family",
    "MaskedDenoiser",
    "MaskedDenoiserConfig",
    "ProbeReport",
    "ProbeState",
    "Window",
    "WindowSession",
    "add_lora",
    "copy_probe",
    "is_diffusion",
    "load_tokenizer",
    "merge_lora",
]
