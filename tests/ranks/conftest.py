import pytest
from gloo_ranks import Ranks


@pytest.fixture(scope="session")
def five():
    """Five ranks for the whole session; a test that needs fewer makes groups of them."""
    ranks = Ranks(5, deadline=40.0)
    yield ranks
    ranks.close()
