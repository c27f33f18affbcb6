"""Strong, uneven decays in 16 bits: every law of `tests.support.decays` within the budget."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.support.decays import rows, settings


@pytest.mark.parametrize("setting", list(settings()), ids=str)
def test_strong_decays_meet_their_budget(setting):
    over = [row for row in rows(setting, torch.device("cuda")) if not row.budget <= 1.0]
    assert not over, "\n".join(map(str, over))
