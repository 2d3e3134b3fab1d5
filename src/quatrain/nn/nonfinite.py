"""The error of NaN and infinity."""


class NonFiniteError(RuntimeError):
    """A number was NaN or infinite where the rest of a run would be lost; the message names module and place."""
