"""The errors of exactkv. Each message says what was given, what was expected and what to do."""


class ExactKVError(Exception):
    """Base of every error that exactkv raises on purpose. The state of what was called is unchanged."""


class InputError(ExactKVError, ValueError):
    """An argument does not fit: its type, range, shape or the object it belongs to."""


class LoadError(ExactKVError):
    """A model, tokenizer or file cannot be loaded as it is."""


class IntegrityError(ExactKVError):
    """A cache breaks its own contract: always a bug, never a matter of input."""
