"""`amt selftest`: what this machine computes, set against what it should."""
