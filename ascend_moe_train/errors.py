"""The exceptions that a user can cause. Each prints as one line and ends the command with exit code 2."""


class UserError(Exception):
    """A mistake in what the user gave us: the message says what, the value, what is allowed, and where."""


class ConfigError(UserError):
    """A run configuration that cannot be used."""


class DataError(UserError):
    """A corpus, tokenizer or token shard that cannot be read."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or of another model."""


class TrainingError(UserError):
    """A run that cannot go on: non-finite values, a spike that does not pass, a device that is not there."""


class MetricsError(UserError):
    """A metrics file or run folder that cannot be read or written."""


class ProfileError(UserError):
    """A profiler's folder or file that cannot be read: the message names file, row and column."""
