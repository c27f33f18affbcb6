"""`python -m kda_ops bits` names the modules whose bits depend on the number of tokens."""

import pytest
import torch
from torch import nn

import kda_ops.nn
from kda_ops.__main__ import main
from kda_ops.tools.bits import FixedRows, check, fix_rows

pytestmark = pytest.mark.quick


class Mean(nn.Module):
    """Subtract the mean over all tokens, which later tokens change."""

    def forward(self, x):
        return x - x.mean(1, keepdim=True)


def model(*extra, invariant=True):
    torch.manual_seed(0)
    layer = kda_ops.nn.GatedDeltaNet(32, head_dim=16, num_heads=2, invariant=invariant)
    parts = nn.Embedding(50, 32), layer, *extra, nn.Linear(32, 50)
    return fix_rows(nn.Sequential(*parts), 1), torch.randint(50, (2, 100))


def right():
    return model()


def wrong():
    return model(nn.Sequential(nn.Identity(), Mean()))


def names(found):
    return {x.name for x in found if any(x.differ.values())}


@pytest.mark.bits
def test_what_depends_on_the_number_of_tokens_is_named():
    assert not names(check(*right()))
    assert names(check(*wrong())) == {"", "2", "2.1"}


@pytest.mark.bits
def test_a_layer_without_the_flag_decodes_with_other_bits():
    found = {x.name: x.differ for x in check(*model(invariant=False))}
    assert found["1"]["decode"] > 0 and not any(found["1.q_conv1d"].values())
    assert check(*right())[-1].differ.keys() == {"1 tokens", "2 tokens", "7 tokens", "64 tokens"}


@pytest.mark.bits
def test_the_command_prints_the_innermost_module(capsys):
    assert main(["bits", f"{__name__}:right"]) == 0
    assert "bits of 0 depend" in capsys.readouterr().out
    assert main(["bits", f"{__name__}:wrong", "--lengths", "1", "99", "500"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("2.1 (Mean): ") and said[0].endswith("entries with 99 tokens differ")
    assert len(said) == 2 and "bits of 3 depend" in said[1]


@pytest.mark.parametrize("words", (["right"], [f"{__name__}:right", "--lengths", "0"]))
def test_wrong_options_are_refused(words):
    with pytest.raises(SystemExit):
        main(["bits", *words])


@pytest.mark.parametrize("shape", ((0, 8), (1, 8), (2, 5, 8), (4, 8), (2, 0, 8)))
def test_fixed_rows_compute_every_row_at_one_shape(shape):
    seen = []
    linear = nn.Linear(8, 3)
    linear.register_forward_hook(lambda _, args, y: seen.append(len(args[0])))
    x = torch.randn(shape, requires_grad=True)
    y = FixedRows(linear, 4)(x)
    torch.testing.assert_close(y, linear(x))
    assert set(seen[:-1]) <= {4, 0}
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_a_module_without_tokens_is_not_compared():
    class Inner(nn.Module):
        def forward(self, size):
            return torch.ones(size)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return x * self.inner(x.shape[-1])

    found = {x.name: x.skipped for x in check(Outer(), torch.randn(2, 70, 4))}
    assert found == {"inner": "no tokens in its arguments or results", "": ""}
