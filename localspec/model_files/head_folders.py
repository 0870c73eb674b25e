"""Where heads lie: those that ship with localspec, and those that were trained here."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from localspec.system.files import home


def heads_folder() -> Path:
    """The folder for heads that were trained here."""
    return home() / "heads"


def engine_folder() -> Path:
    """The folder for what ``head_assembly`` makes of heads; all in it can be made again."""
    return heads_folder() / "engine"


def find_heads() -> list[Path]:
    """The head files there are: trained here, the newest first, then shipped."""
    trained = sorted(heads_folder().glob("*.gguf"), key=lambda path: (-path.stat().st_mtime, path.name))
    packaged = resources.files("localspec").joinpath("heads")
    # In a checkout they have not been copied into the package.
    shipped = Path(str(packaged)) if packaged.is_dir() else Path(__file__).resolve().parents[2] / "models" / "heads"
    return [*trained, *sorted(shipped.glob("*.gguf"))]
