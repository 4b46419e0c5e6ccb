"""Measurements that users make on their own machine: `amt bench`."""
