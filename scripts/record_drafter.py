"""Record the hashes of the drafter that ships with the package, after its weights or its card were changed.

usage: python scripts/record_drafter.py

Loading the default drafter compares its files with this record (``specdiff.json`` beside them), and refuses others.
"""

from __future__ import annotations

from specdiff.hub.manifest import write_manifest
from specdiff.loading import DEFAULT_DENOISER, DEFAULT_TARGET, default_denoiser

if __name__ == "__main__":
    manifest = write_manifest(
        default_denoiser(),
        name=DEFAULT_DENOISER,
        title=f"block-causal denoiser for {DEFAULT_TARGET}",
        licence="Apache-2.0",
        label="",
        provenance={"script": "scripts/train_default_drafter.py"},
    )
    print(manifest.fingerprint)
