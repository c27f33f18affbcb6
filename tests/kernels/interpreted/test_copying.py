"""Plans carry named tuples and tensor descriptors."""

from tests.support import copying


def test_named_tuples_and_descriptors_are_made_for_the_tensors_of_the_call():
    copying.check("cpu")
