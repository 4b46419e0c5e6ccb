"""A rank whose command has an error in it."""

import sys
from unittest.mock import patch

from ascend_moe_train.cli import rank_main

if __name__ == "__main__":
    with patch.object(rank_main, "attempt", side_effect=ZeroDivisionError("of a test\nand more")):
        sys.exit(rank_main.main([]))
