"""Which GPUs a process of pytest-xdist sees."""


def rotated(process: str, count: int, visible: str | None = None) -> str:
    """The GPUs for CUDA_VISIBLE_DEVICES such that "cuda" is another one in each process: "gw5" of 4 begins with the second."""
    ids = visible.split(",") if visible else list(map(str, range(count)))
    first = int(process.removeprefix("gw")) % len(ids)
    return ",".join(ids[first:] + ids[:first])
