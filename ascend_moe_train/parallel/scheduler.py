"""`python -m ascend_moe_train.parallel.scheduler`: the process by which the ranks that msrun started find each other.

It returns when all of them have ended. Its warnings go to a log of its own; that its port is taken is only one of them.
"""

import os

LEVEL = "GLOG_v"  # read while MindSpore is imported

if __name__ == "__main__":
    os.environ[LEVEL] = min(os.environ.get(LEVEL, "2"), "2")

    from ascend_moe_train.parallel.native import NativeOps

    NativeOps()
