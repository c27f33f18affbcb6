"""Let a checkout run without an install.

A checkout holds `kda_ops.registrations` next to the package; an installed package contains it.
"""

import importlib.util
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent / "registrations"


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "kda_ops.registrations":
            return importlib.util.spec_from_file_location(
                name, _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)]
            )
        return None


if _FOLDER.is_dir() and not (Path(__file__).parent / "registrations").exists():
    sys.meta_path.insert(0, _Finder)  # first, or an installed checkout's finder would win
