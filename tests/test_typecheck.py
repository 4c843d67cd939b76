"The shapes in the annotations are checked while the tests run."

import pytest
import torch

from bft_nb import core


def test_annotations_are_checked_in_tests():
    with pytest.raises(Exception, match="lam"):
        core.check_precision(torch.ones(3, dtype=torch.int64))  # annotated Float
