"""Every exception that specdiff raises on purpose.

::

    SpecdiffError
    ├── InputError (also ValueError)      an argument or option is wrong: name, expected, got, remedy
    │   ├── PairingError                  two parts that are fine alone do not fit (rule and draft, vocabularies, ...)
    │   └── ContextOverflowError          the request does not fit the model's context
    ├── ModelError (also RuntimeError)    a model misbehaved or cannot be used
    │   ├── UnsupportedModelError         this architecture cannot be a target or drafter, and why
    │   ├── CheckpointError               files missing, truncated, tampered with, or of a refused kind
    │   └── NumericsError                 NaN or infinite logits
    ├── DrafterError (also RuntimeError)  a drafter raised, or returned something that is not a draft
    └── DownloadError (also OSError)      fetching a model failed; what was fetched is kept for resuming

Those of corpora stand beside their kinds of broken line in `specdiff.corpus.problems`.
"""

from __future__ import annotations


class SpecdiffError(Exception):
    """Base of every error raised on purpose by specdiff."""


class InputError(SpecdiffError, ValueError):
    """An argument is wrong; the message names it, says what was expected, what came, and the remedy."""

    @classmethod
    def of(cls, name: str, *, expected: str, got: object, remedy: str) -> InputError:
        """Build the message in the one form used everywhere: ``name: expected ..., got ...; remedy``."""
        return cls(f"{name}: expected {expected}, got {got!r}; {remedy}")


class PairingError(InputError):
    """Two parts that are fine alone do not fit together (rule and draft, drafter and target vocabulary)."""


class ContextOverflowError(InputError):
    """The request does not fit into the model's context length."""


class ModelError(SpecdiffError, RuntimeError):
    """A model misbehaved or cannot be used."""


class UnsupportedModelError(ModelError):
    """This architecture cannot serve as target or drafter; the message says why."""


class CheckpointError(ModelError):
    """Checkpoint files are missing, truncated, tampered with, or of a kind that is refused (pickle)."""


class NumericsError(ModelError):
    """A model produced NaN or infinite logits."""


class DrafterError(SpecdiffError, RuntimeError):
    """A drafter raised, or returned something that is not a valid draft."""


class DownloadError(SpecdiffError, OSError):
    """Fetching a model failed; complete parts are kept so that the next attempt resumes."""
