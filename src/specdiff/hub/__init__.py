"""The model store: a catalog of models, fetched whole, converted once, checked before every load.

A loader needs three names: ``ModelStore().resolve(name)`` (a checked folder, or a hub id passed through),
`check_folder` (the same checks for a folder found otherwise) and `model_fingerprint`.
"""

from specdiff.hub.catalog import CATALOG, CatalogEntry
from specdiff.hub.fingerprint import model_fingerprint
from specdiff.hub.progress import Progress, ProgressCallback
from specdiff.hub.safety import check_folder
from specdiff.hub.store import Location, ModelStatus, ModelStore, State

__all__ = [
    "CATALOG",
    "CatalogEntry",
    "Location",
    "ModelStatus",
    "ModelStore",
    "Progress",
    "ProgressCallback",
    "State",
    "check_folder",
    "model_fingerprint",
]
