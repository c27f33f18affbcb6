"""Which GPUs a process of pytest-xdist sees, and in what order tests/gpu runs."""

LONG = ("test_export.py", "test_compiled.py")  # minutes of compiling


def rotated(process: str, count: int, visible: str | None = None) -> str:
    """The GPUs for CUDA_VISIBLE_DEVICES such that "cuda" is another one in each process: "gw5" of 4 begins with the second."""
    ids = visible.split(",") if visible else list(map(str, range(count)))
    first = int(process.removeprefix("gw")) % len(ids)
    return ",".join(ids[first:] + ids[:first])


def longest_first(items: list) -> None:
    """Sort collected tests so that none on a GPU that takes minutes begins last."""
    names = [next((i for i, name in enumerate(LONG) if f"tests/gpu/{name}" in item.nodeid), len(LONG)) for item in items]
    items[:] = [item for _, item in sorted(zip(names, items), key=lambda pair: pair[0])]
