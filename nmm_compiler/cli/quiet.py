"""Libraries whose warnings are about no command say only errors, in every process of a command."""

import logging

_LOGGERS = ("torchao", "torch.utils._pytree")
"""transformers imports torchao where it is installed; torchao then warns of GPU libraries that it
cannot load, and torch of how torchao registers its classes. No command uses either."""


def quiet_libraries() -> None:
    """Raise the level of these libraries' loggers; call it before they are imported."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
