"""Plans of the Triton backend, for tests that change what it decides by."""

import sys


def forget_plans() -> None:
    """Have the next call of each kind decide anew, if the backend is loaded at all."""
    module = sys.modules.get("kda_ops.backends.triton.backend")
    if module is not None:
        module.BACKEND.forget()


def last_plan() -> str:
    """Return the plan that was made last, as text."""
    plans = sys.modules["kda_ops.backends.triton.backend"].BACKEND.plans.values()
    return str([plan for some in plans for plan in some][-1])
