"""`python -m ascend_moe_train.parallel.scheduler`: the process by which the ranks that msrun started find each other.

It returns when all of them have ended.
"""

from ascend_moe_train.parallel.native import NativeOps

if __name__ == "__main__":
    NativeOps()
