"""The kernels that key a row of the evidence are the kernels that its call launches."""

from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context

import pytest
import torch

from benchmarks.peers import our_forward, our_step
from kda_ops.tools import digests
from kda_ops.tools.cases import Case, make_inputs
from kda_ops.tools.machine_code import compiled_code

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CASES = (
    "kda fwdbwd B8T4096H32 bound fp32 kv",
    "kda fwd B1T8192H16 bound fp32 kv",
    "kda fwd B1T65536H32 strong fp32 kv",
    "gdn fwdbwd B1T8192H96 softplus fp32 kv",
    "kda decode B8T1H32 bound bf16 vk",
)


def launched(name):
    """Return the digests of the kernels that our side of a case runs on this GPU."""
    from kda_ops.backends.triton import BACKEND
    from kda_ops.backends.triton.recording import Launch

    case = Case.named(name, "cuda")
    x = make_inputs(case)
    if case.pass_ == "decode":
        shape = [case.sizes[n] for n in ("B", "HV", "D", "D")]
        pool = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        with torch.inference_mode():
            our_step(case, x)(pool)
    elif case.pass_ == "fwd":
        with torch.no_grad():
            our_forward(case)(x)
    else:
        o = our_forward(case)({n: t.requires_grad_() for n, t in x.items()})
        o.backward(torch.randn_like(o))
    torch.cuda.synchronize()
    plans = chain.from_iterable(BACKEND.plans.values())
    return [compiled_code(x.compiled) for p in plans for x in p.steps if isinstance(x, Launch)]


def alone(function, name):
    """Call a function in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, name).result()


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_keyed_by_the_kernels_that_run(name, monkeypatch):
    here = torch.cuda.get_device_properties(0)
    if (here.major, here.multi_processor_count) != (9, digests.PROCESSORS):
        pytest.skip("digests are of an H100 or H200")
    # Where Inductor has compiled, Triton takes torch's ptxas; rows are measured without Inductor.
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    keyed, found = alone(digests.kernels_of, name), alone(launched, name)
    assert sorted(k.partition(":")[2] for k in keyed.split()) == sorted(found)
