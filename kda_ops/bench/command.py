"""``python -m kda_ops bench``: the table of `compare`, a whole model with ``--model``, the tables
of the README with ``--readme``.
"""

from __future__ import annotations

from kda_ops.bench import compare, model, readme


def main(argv: list[str]) -> int:
    """Run the one that is asked for."""
    if argv[:1] == ["--readme"]:
        return readme.main(argv[1:])
    return (
        model.main([a for a in argv if a != "--model"]) if "--model" in argv else compare.main(argv)
    )
