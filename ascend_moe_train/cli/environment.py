"""Keeps libraries from talking over the table. Imported before MindSpore."""

import os


def quiet_mindspore() -> None:
    """MindSpore logs errors only, unless GLOG_v says otherwise; it reads the variable when it is imported."""
    os.environ.setdefault("GLOG_v", "3")
