"""Skip the files of a folder unimported, where what they need is missing."""

import pytest


class Skipped(pytest.Module):
    """A file of tests that is not imported."""

    reason: str

    def collect(self):
        """Skip the file."""
        pytest.skip(self.reason, allow_module_level=True)


def skip_files(reason: str):
    """Return the hook with which a conftest.py skips the files of its folder."""

    def pytest_pycollect_makemodule(module_path, parent):
        skipped = Skipped.from_parent(parent, path=module_path)
        skipped.reason = reason
        return skipped

    return pytest_pycollect_makemodule
