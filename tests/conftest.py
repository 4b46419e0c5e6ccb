"""What several tests share."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# read while MindSpore is imported: see ascend_moe_train/cli/environment.py
os.environ.setdefault("GLOG_v", "3")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

from tests.small_run import make_corpus

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell starts background commands with Ctrl-C ignored, and what the tests start would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus that nobody changes."""
    return make_corpus(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module", autouse=True)
def compiled_graphs_leave() -> Iterator[None]:
    """They are in cycles of references, and those of all modules fill some gigabytes."""
    yield
    gc.collect()
