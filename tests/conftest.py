"""What several tests share."""

from pathlib import Path

import pytest

from tests.small_run import make_corpus


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus that nobody changes."""
    return make_corpus(tmp_path_factory.mktemp("small"))
