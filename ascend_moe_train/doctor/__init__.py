"""From logs to the root cause, the first failing rank and the fix. Pure."""
