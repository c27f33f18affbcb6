"""FLOP formulas: numbers worked out by hand, in training, inference and under fake tensors, and the
hook that registers them.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import kda_ops
from kda_ops import flops
from kda_ops.registrations.schemas import mask_of
from kda_ops.stages import GRADIENTS
from tests.support.fresh import python

# Per chunk of 64 tokens and value head at K = V = 128, in products of 2 * 64 * 64 * 128 operations:
# forward 2 scores, w, u, wS (2), qg S (2), P v_new, kg^T v_new (2); backward as in
# `flops.backward`. The inverse is 2 (0 + 1 + 4 + ... + 63^2).
PRODUCT, INVERSE = 1_048_576, 170_688
FORWARD = 11 * PRODUCT + INVERSE
BACKWARD = 31 * PRODUCT  # with A kept
TOKEN = 98_304  # 6 * 128 * 128


def inputs(namespace, B, T, H, HV, K, V, device="cpu", requires_grad=False):
    decay = (B, T, HV, K) if namespace == "kda" else (B, T, HV)
    shapes = ((B, T, H, K), (B, T, H, K), (B, T, HV, V), decay, (B, T, HV))
    return [torch.zeros(s, device=device, requires_grad=requires_grad) for s in shapes]


def counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return {str(packet): n for packet, n in counter.get_flop_counts()["Global"].items()}


@pytest.mark.quick
def test_the_formulas_give_the_numbers_worked_out_by_hand():
    assert flops.forward(128, 128) == FORWARD == 11_705_024
    assert flops.backward(128, 128, frozenset({"A"})) == BACKWARD == 32_505_856
    assert flops.backward(128, 128, frozenset()) == BACKWARD + INVERSE
    assert flops.token(128, 128) == TOKEN


def test_widths_count_each_where_they_stand():
    C, K, V = 64, 20, 12
    CK, CV, KV = 2 * C * C * K, 2 * C * C * V, 2 * C * K * V
    assert flops.forward(K, V) == 3 * CK + 2 * CV + 3 * KV + INVERSE
    assert (
        flops.backward(K, V, frozenset({"A", "P", "w", "u", "states", "v_new"}))
        == 7 * CK + 4 * CV + 6 * KV + 4 * C**3
    )
    assert flops.backward(K, V, frozenset({"A"})) == 9 * CK + 5 * CV + 8 * KV + 4 * C**3


@pytest.mark.parametrize(
    "namespace, chunk", [("kda", kda_ops.chunk_kda), ("gdn", kda_ops.chunk_gdn)]
)
class TestChunk:
    @pytest.mark.quick
    @pytest.mark.parametrize(
        "sizes, offsets, chunks",
        (
            ((2, 128, 1, 2), None, 2 * 2 * 2),  # batch, chunks, value heads
            ((1, 65, 1, 1), None, 2),  # the last chunk counts whole
            ((1, 128, 1, 1), (0, 30, 128), 2),  # a packed call counts as one sequence
        ),
    )
    def test_inference_counts_chunk(self, namespace, chunk, sizes, offsets, chunks):
        cu_seqlens = offsets and torch.tensor(offsets)
        args = inputs(namespace, *sizes, 128, 128)
        got = counted(lambda: chunk(*args, cu_seqlens=cu_seqlens))
        assert got == {f"{namespace}.chunk": chunks * FORWARD}

    @pytest.mark.quick
    def test_training_counts_forward_and_backward(self, namespace, chunk):
        args = inputs(namespace, 1, 64, 2, 2, 128, 128, requires_grad=True)
        got = counted(lambda: chunk(*args)[0].sum().backward())
        # The inverse is recomputed: float32 inputs keep nothing.
        assert got == {
            f"{namespace}.chunk_fwd": 2 * FORWARD,
            f"{namespace}.chunk_bwd": 2 * (BACKWARD + INVERSE),
        }

    def test_keeping_intermediates_recomputes_nothing(self, namespace, chunk):
        args = inputs(namespace, 1, 64, 1, 1, 128, 128, requires_grad=True)
        got = counted(lambda: chunk(*args, disable_recompute=True)[0].sum().backward())
        # Not again: P, w, u (one product each), w S and kg^T v_new (two each).
        assert got[f"{namespace}.chunk_bwd"] == BACKWARD - 7 * PRODUCT

    def test_a_kept_inverse_is_not_counted_again(self, namespace, chunk):
        ops, need = getattr(torch.ops, namespace), mask_of([True] * len(GRADIENTS))
        # 16-bit inputs on a GPU keep A; a build for CPUs has no autograd for them, so the operators
        # are called as autograd would
        with FakeTensorMode():
            args = [x.bfloat16() for x in inputs(namespace, 1, 64, 1, 1, 128, 128, device="cuda")]
            o, _, *kept = ops.chunk_fwd(*args)
            got = counted(lambda: ops.chunk_bwd(o, None, *kept, *args, need=need))
        assert got == {f"{namespace}.chunk_bwd": BACKWARD}

    def test_halves_of_a_shard_scan_twice_and_prepare_once(self, namespace, chunk):
        ops, need = getattr(torch.ops, namespace), mask_of([True] * 5)
        with FakeTensorMode():  # on a GPU, as above
            args = [x.bfloat16() for x in inputs(namespace, 1, 64, 1, 1, 128, 128, device="cuda")]
            rest = *args, None, None
            _, runs, *tile, AP = ops.chunk_map(*rest)
            o, _, starts = ops.chunk_join(*rest, None, None, runs, *tile)
            A, tiled = (AP, *tile), (runs, starts, *tile)
            A = next(x for x in A if x.dim() > 1)
            calls = {
                "chunk_map": lambda: ops.chunk_map(*rest),
                "chunk_join": lambda: ops.chunk_join(*rest, None, None, runs, *tile),
                "chunk_map_bwd": lambda: ops.chunk_map_bwd(*rest, None, o, None, A),
                "chunk_join_bwd": lambda: ops.chunk_join_bwd(
                    o, None, *tiled, *rest, None, None, need=need
                ),
            }
            got = {name: counted(call)[f"{namespace}.{name}"] for name, call in calls.items()}
        assert (runs.shape, starts.shape) == ((1, 1, 128, 256), (1, 1, 128, 128))
        assert got == {
            "chunk_map": FORWARD + PRODUCT,  # less o (3), and K more columns (4)
            "chunk_join": 7 * PRODUCT,
            "chunk_map_bwd": 13 * PRODUCT,  # P and w (2), the scan (7), K more columns (4)
            "chunk_join_bwd": BACKWARD - 2 * PRODUCT,
        }

    def test_fake_tensors_count_like_real_ones(self, namespace, chunk):
        with FakeTensorMode():
            args = inputs(namespace, 1, 64, 1, 1, 128, 128)
            assert counted(lambda: chunk(*args)) == {f"{namespace}.chunk": FORWARD}


@pytest.mark.parametrize("namespace", ["kda", "gdn"])
class TestTokens:
    @pytest.mark.quick
    def test_recurrent_counts_tokens(self, namespace):
        op = getattr(torch.ops, namespace).recurrent
        assert counted(lambda: op(*inputs(namespace, 2, 3, 1, 4, 128, 128))) == {
            f"{namespace}.recurrent": 2 * 3 * 4 * TOKEN
        }

    def test_recurrent_in_training_counts_its_chunked_backward(self, namespace):
        op = getattr(torch.ops, namespace).recurrent
        args = inputs(namespace, 1, 3, 1, 1, 128, 128, requires_grad=True)
        got = counted(lambda: op(*args)[0].sum().backward())
        assert got == {
            f"{namespace}.recurrent": 3 * TOKEN,
            f"{namespace}.chunk_bwd": BACKWARD + INVERSE,
        }

    def test_in_place_operators_count_like_the_others(self, namespace):
        ops = getattr(torch.ops, namespace)
        args = inputs(namespace, 1, 64, 1, 1, 128, 128)
        pool = torch.zeros(1, 1, 128, 128)
        assert counted(lambda: ops.recurrent_(*args, pool)) == {
            f"{namespace}.recurrent_": 64 * TOKEN
        }
        assert counted(lambda: ops.chunk_(*args, pool)) == {f"{namespace}.chunk_": FORWARD}


def test_asking_whether_the_counter_exists_does_not_use_up_the_hook():
    python("""
        import importlib.util, kda_ops
        assert importlib.util.find_spec("torch.utils.flop_counter")
        import torch.utils.flop_counter
        assert torch.ops.kda.chunk in torch.utils.flop_counter.flop_registry
    """)
