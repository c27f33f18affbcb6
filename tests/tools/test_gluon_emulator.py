"""The emulator of Gluon computes what a kernel says, and notices what the kernel lacks."""

from types import SimpleNamespace

import pytest
import torch

from tests.support import gluon_emulator as emulator
from tests.support.emulated import without_each

pytestmark = pytest.mark.quick
BF16 = torch.bfloat16
SQUARES = '''
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma
)
from kda_ops.backends.triton.device.gluon_names import barrier, load_tile, store_tile, wait_products


@gluon.jit
def produce(x_d, x, full, free, tiles):
    for n in range(tiles):
        mbarrier.wait(free, n & 1 ^ 1)
        mbarrier.expect(full, 2 * 16 * 16)
        load_tile(x_d, [n * 16, 0], full, x)


@gluon.jit
def consume(y_d, x, y, full, free, tiles):
    total = gl.zeros([16, 16], gl.float32, None)
    for n in range(tiles):
        mbarrier.wait(full, n & 1)
        total = warpgroup_mma(x, x, total, is_async=True)
        total = wait_products(0, deps=(total,))
        barrier()
        mbarrier.arrive(free)
        tma.store_wait(0)
        y.store(total.to(y.dtype))
        fence_async_shared()
        barrier()
        store_tile(y_d, [n * 16, 0], y)
    tma.store_wait(0)


@gluon.jit
def squares(x_d, y_d, tiles):
    """Write the sums of the squares of tiles."""
    x = gl.allocate_shared_memory(x_d.dtype, [16, 16], x_d.layout)
    y = gl.allocate_shared_memory(x_d.dtype, [16, 16], x_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [(consume, (y_d, x, y, full, free, tiles)), (produce, (x_d, x, full, free, tiles))],
        [1],
        [24],
    )
'''
ROWS = 70  # the last tile has six
NOTICED = {
    "produce: mbarrier.wait(free, n & 1 ^ 1)": "race: |too many arrivals",
    "produce: mbarrier.expect(full, 2 * 16 * 16)": "hang: consume at consume:22",
    "consume: mbarrier.wait(full, n & 1)": "race: (produce:15|consume:23)|hang: produce",
    "consume: wait_products(0, deps=(total,))": "reads the product of consume:23|race: consume:23",
    "consume: barrier()": "race: consume:23 loads, produce:15 stores",
    "consume: mbarrier.arrive(free)": "hang: consume at consume:22, produce at produce:13",
    "consume: tma.store_wait(0)": "race: consume:31 loads, consume:28 stores",
    "consume: fence_async_shared()": "no fence between consume:28, which stores, and consume:31",
    "consume: barrier() #2": "race: consume:28 stores, consume:31 loads",
    "consume: tma.store_wait(0) #2": "consume ends before its products or stores do",
    "squares: fence_async_shared()": "no fence after the initialisation .* produce:15",
}


def descriptor(x: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(base=x, shape=x.shape, strides=x.stride(), block_shape=[16, 16])


def squares(source: str = SQUARES, seed: int = 0) -> torch.Tensor:
    x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(0)).to(BF16)
    y = torch.full((ROWS, 16), torch.nan, dtype=BF16)
    kernels = emulator.module("squares.py", {"squares": source})
    tiles = -(-ROWS // 16)
    emulator.launch(kernels.squares, 1, seed, x_d=descriptor(x), y_d=descriptor(y), tiles=tiles)
    return y


def test_tiles_outside_are_zero_and_not_written():
    x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(0)).to(BF16).float()
    tiles = torch.cat([x, torch.zeros(10, 16)]).view(5, 16, 16)
    want = (tiles @ tiles).cumsum(0).view(80, 16)[:ROWS]
    torch.testing.assert_close(squares().float(), want, rtol=2**-8, atol=2**-8)


def test_no_order_changes_the_result():
    for seed in range(1, 20):
        assert torch.equal(squares(seed=seed), squares())


@pytest.mark.parametrize("change", NOTICED)
def test_the_lines_of_a_fault_are_named_in_any_order(change):
    source = without_each(SQUARES)[change]
    for seed in range(10):
        with pytest.raises(emulator.Fault, match=NOTICED[change]):
            squares(source, seed)


def test_all_that_orders_a_kernel_is_taken_out_once_and_moves_no_line():
    changed = without_each(SQUARES)
    assert changed.keys() == NOTICED.keys()
    for source in changed.values():
        assert source != SQUARES and source.count("\n") == SQUARES.count("\n")


def test_a_copy_that_nothing_waits_for_is_noticed():
    loop = "for n in range({}):\n        mbarrier.wait(free"
    assert loop.format("tiles") in SQUARES
    source = SQUARES.replace(loop.format("tiles"), loop.format("tiles + 1"))
    with pytest.raises(emulator.Fault, match="nothing waits for the copy of produce:15"):
        squares(source)
