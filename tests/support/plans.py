"""Plans of the Triton backend, for tests that change what it decides by."""

import sys


def forget_plans() -> None:
    """Have the next call of each kind decide anew, if the backend is loaded at all."""
    module = sys.modules.get("kda_ops.backends.triton.backend")
    if module is not None:
        module.BACKEND.forget()
