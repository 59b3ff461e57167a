from collections.abc import Iterator

import pytest
import torch

from commkern.testing import RankPool


def pytest_configure() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that serve as ranks; ``ranks.run(world_size, fn, *args)``."""
    with RankPool() as pool:
        yield pool
